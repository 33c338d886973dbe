"""What sparse decode costs in quality: perplexity and needle recall, dense against Quest."""
