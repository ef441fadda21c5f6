"""The analyzers: one module or package, one question. They never import each other."""
