"""Built-in models, one family a file; `config.registry.MODELS` lists them."""
