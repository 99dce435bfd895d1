"""Data that a model's own tokenizer turns to tokens: documents read, tokenised once into mapped files, packed, and cut.

``documents`` reads text, JSONL and Parquet; ``tokenizing`` makes tokens of texts and chats; ``token_files`` is what the
store's directory keeps, written by ``making``; ``data`` packs documents into sequences and gives batches. transformers
and pyarrow are imported when a file is tokenised.
"""
