"""Data that a model's own tokenizer turns to tokens: documents read, tokenised once into mapped files, packed, and cut.

``documents`` reads text, JSONL and Parquet; ``tokenizing`` and ``chats`` make tokens of them; ``files`` is what is kept
in the store's directory, made by ``making``; ``packing`` lays documents into sequences; ``data`` gives batches. Of
transformers and pyarrow nothing is imported until a file is tokenised.
"""
