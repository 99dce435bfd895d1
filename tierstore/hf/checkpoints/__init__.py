"""Files of safetensors: read tensor by tensor, dequantised, written as streams."""
