"""The theorems study: path sums, overlap, path regions and frozen gates, exactly (claims C1-C6, C26)."""
