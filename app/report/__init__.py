"""What a person looks at: what a run will learn from, before it does."""
