"""From text to tokens and back: tokenizers and chat templates, sampling, stop strings over streamed text."""
