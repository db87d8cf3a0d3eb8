"""Data in object storage: urls, the objects behind them, and a cache of their bytes. Nothing here imports torch.

Readers of formats ask an `objects.RemoteObject` for bytes. It takes them from blocks on the disk (`blocks`), or asks a
process of its own for them (`client`, `server`): the library that talks to stores (`stores`) has threads that do not
survive a fork, and training forks workers.
"""
