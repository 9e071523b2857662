"""Values on the virtual GPU: which operators' results are computed on the host, and how."""
