"""`verify`: compares the first steps on the replicas with the same steps on one device."""
