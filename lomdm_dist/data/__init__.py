"""Raw text -> token shards (prepare), and reading them (shards)."""
