// Writes a reply as the scenario expects it.
const shown = (reply) =>
  Array.isArray(reply) ? '[' + reply.map(shown).join(',') + ']' : typeof reply === 'string' ? `"${reply}"` : String(reply)

module.exports = shown
