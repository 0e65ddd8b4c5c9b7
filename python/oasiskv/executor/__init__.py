"""One engine in its own process, behind an authenticated local socket."""
