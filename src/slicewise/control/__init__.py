"""The control plane without its wires: who may have what, decided and recorded entry by entry."""
