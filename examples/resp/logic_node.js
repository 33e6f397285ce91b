// A logic node with ioredis. Run it as `node logic_node.js`, with PORT and TOKEN in the environment.
const { Redis } = require('ioredis')
const PORT = Number(process.env.PORT || 7417), TOKEN = process.env.TOKEN

const storeOffline = async (id, client = '0') => console.log('offline', id, client)

async function main() {
  const redis = new Redis({ port: PORT, password: TOKEN, maxRetriesPerRequest: null })
  redis.on('error', (error) => console.log(error.message)) // It connects again by itself.
  const taker = redis.duplicate() // A connection that only takes.
  await redis.call('AW.ADD', '101:7', '102:8') // before the push
  console.log(await redis.call('AW.DEL', '101:7')) // the Ack of the phone: [ 'acked' ]
  for (;;) {
    for (const [batch, , messages] of await taker.call('AW.TAKE', 'default', 'BLOCK', 2000)) {
      for (const message of messages) await storeOffline(...message.split(':'))
      await redis.call('AW.ACK', 'default', batch)
    }
  }
}

main()
