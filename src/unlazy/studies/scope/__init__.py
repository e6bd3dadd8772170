"""Studies behind the scope: where its words come from."""
