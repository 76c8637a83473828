"""Places of files: a directory, S3 or another object store; and the causes of such a store's failure."""
