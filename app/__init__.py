"""loft: fine-tune large language models with Lightning, composed by Hydra."""

from app.process.hugepages import take_large_pages

# Here and not in app/train.py: what is imported before would be imported twice.
take_large_pages("app.train")
