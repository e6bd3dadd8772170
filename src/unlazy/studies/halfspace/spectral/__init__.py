"""Is "easy half first" just the spectral bias of a fixed kernel? The network beside its linearisation (claim C29)."""
