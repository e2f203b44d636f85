"""How a call is computed. :class:`flashmod.dispatch.Backend` says what each module here offers."""
