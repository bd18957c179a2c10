"""The field recipes on tiny models: what each system must show, sentence by sentence."""
