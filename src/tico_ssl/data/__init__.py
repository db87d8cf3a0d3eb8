"""Where pixels come from: sources, decoding, the drawn textures, and the loader."""

from tico_ssl.data.bad_files import BadFiles, survey
from tico_ssl.data.loader import Loader
from tico_ssl.data.source import Source
from tico_ssl.data.sources import DataConfig, as_source, open_source, open_training
