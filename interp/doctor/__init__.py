"""`interp doctor`: an instrument is checked before it is believed.

`examination` examines a loaded model (public as `interp.examine`) or one that is named;
`installation` what is installed. Each check compares with something that does not share its code:
the forward pass written out in numpy (`arithmetic`), or the checkpoint as plain transformers loads
it.
"""
