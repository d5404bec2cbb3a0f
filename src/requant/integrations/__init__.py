"""requant inside of other projects: each package here fits it into one of them."""
