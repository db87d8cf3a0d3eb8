"""Sources of images: formats, decoding, bad files, the synthetic textures."""
