"""Where pixels come from: sources, formats, decoding, the drawn textures."""
