"""Many ranks: how they start and find each other, share a host store, follow rank 0's plans and move sequences."""
