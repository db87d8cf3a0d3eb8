"""Where pixels come from: sources, decoding, the drawn textures, and the loader."""

from tico_ssl.data.loader import Loader
from tico_ssl.data.sources import DataConfig, Source, open_source
