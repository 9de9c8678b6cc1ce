"""To Hugging Face `transformers`: a folder that loads without this package."""
