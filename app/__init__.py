"""loft: fine-tune large language models with Lightning, composed by Hydra."""
