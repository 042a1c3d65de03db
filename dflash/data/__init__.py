"""Reading, batching and preparing tokenized completions."""
