"""One file per self-supervised method; the file name is the name in a recipe.

A method file has `Config`, a `MethodConfig` with its settings (whose `check_data` may refuse images or labels), and
`build(config, backbone)`, which returns a module that keeps the contract `tico_ssl.methods._base.Method`.
"""
