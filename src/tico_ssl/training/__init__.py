"""The loop, its checkpoints and its monitor."""

from tico_ssl.training.pretrain import pretrain
