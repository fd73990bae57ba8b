"""python -m heavywater"""

from heavywater.cli.app import main

main()
