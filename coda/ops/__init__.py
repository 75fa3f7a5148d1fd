"""The operators: for each, the public function, the fake kernel and the autograd formula. One file a family."""
