"""Documents for a model's own tokenizer: read, tokenised once into mapped files, and packed into sequences.

``documents`` reads text, JSONL and Parquet; ``tokenizing`` tokenises texts and chats; ``making`` writes the files in the
store's directory, in the format of ``token_files``; ``data`` packs documents into sequences and makes batches.
transformers and pyarrow are imported only when a file is tokenised.
"""
