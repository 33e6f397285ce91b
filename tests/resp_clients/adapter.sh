#!/usr/bin/env bash
# Runs commands of the scenario with redis-cli, each over a connection of its own: `adapter.sh PORT PASSWORD`.
while IFS=$'\t' read -r -a words; do
    password=()
    [[ -z $2 ]] || password=(-a "$2" --no-auth-warning)
    if [[ ${words[1]} == PIPELINE ]]; then
        for ((id = 0; id < words[2]; id++)); do echo "AW.ADD $id"; done |
            redis-cli -p "$1" "${password[@]}" --json | sed 's/^\[\([0-9]*\),.*/\1/' | paste -sd+ | bc
        continue
    fi
    reply=$(redis-cli -p "$1" "${password[@]}" --json "${words[@]:1}" 2>&1)
    case $reply in
    [[\"0-9]*) tr -d '\n' <<<"$reply"; echo ;;
    *) echo "error $(tr -d '\n' <<<"${reply#error:}")" ;;
    esac
done
