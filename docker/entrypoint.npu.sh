#!/bin/bash
# CANN's variables (PATH, LD_LIBRARY_PATH) from its own script, then the command. Which folder has the script depends on
# CANN's version; where none has, the variables are taken to be set already.
root=${ASCEND_ROOT:-/usr/local/Ascend}
command=("$@")
set -- # a sourced script would take them for its own
for script in "$root"/cann/set_env.sh "$root"/ascend-toolkit/set_env.sh "$root"/*/set_env.sh; do
  if [ -f "$script" ]; then
    source "$script"
    exec "${command[@]}"
  fi
done
echo "no set_env.sh in a folder of $root: CANN's variables are left as they are" >&2
exec "${command[@]}"
