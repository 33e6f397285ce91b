<?php
// Writes a reply as the scenario expects it.
function shown($reply): string {
    if (is_array($reply)) {
        return '[' . implode(',', array_map('shown', $reply)) . ']';
    }
    return is_int($reply) ? (string) $reply : '"' . $reply . '"';
}
