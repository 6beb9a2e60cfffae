"""x"""


def write(a, b, c):
    pass
