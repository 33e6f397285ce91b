// Runs commands of the scenario with ioredis, iovalkey or node-redis: `adapter.js MODULE PORT PASSWORD`.
const shown = require('./shown')
const [name, port, password] = [process.argv[2], Number(process.argv[3]), process.argv[4] || undefined]
const module_ = require(name)
const clients = new Map()

async function client(number) {
  if (!clients.has(number)) {
    if (name.startsWith('redis')) {
      const redis = module_.createClient({ socket: { port }, password })
      redis.on('error', () => {})
      await redis.connect()
      clients.set(number, (words) => redis.sendCommand(words))
    } else {
      const Redis = module_.Redis || module_
      const redis = new Redis({ port, password })
      redis.on('error', () => {})
      clients.set(number, (words) => redis.call(...words))
    }
  }
  return clients.get(number)
}

async function run(number, words) {
  const call = await client(number)
  try {
    if (words[0] === 'PIPELINE') {
      const replies = await Promise.all([...Array(Number(words[1])).keys()].map((id) => call(['AW.ADD', String(id)])))
      return String(replies.reduce((sum, [added]) => sum + Number(added), 0))
    }
    if (words[0] === 'SHARED') {
      // One connection for a waiting AW.TAKE and an Ack behind it.
      const take = call(['AW.TAKE', 'default', 'BLOCK', '5000'])
      const began = Date.now()
      await call(['AW.DEL', words[1]])
      await take
      return Date.now() - began < 1000 ? '"at once"' : '"late"'
    }
    return shown(await call(words))
  } catch (error) {
    return 'error ' + error.message
  }
}

let previous = Promise.resolve()
require('readline').createInterface({ input: process.stdin }).on('line', (line) => {
  const [number, ...words] = line.split('\t')
  previous = previous.then(async () => console.log(await run(number, words)))
}).on('close', () => previous.then(() => process.exit(0)))
