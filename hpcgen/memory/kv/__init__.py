"""Where the KV of running sequences lies: in place in the host store, in pages on the device, or streamed by layer."""
