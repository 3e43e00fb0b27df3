// Rows of a table to Kafka by goharvest, with its own defaults: the peer of the benchmark's outbox. The first argument is
// the job as JSON. Ends on SIGTERM, and at once when its standard input ends.
package main

import (
	"encoding/json"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/obsidiandynamics/goharvest"
	"github.com/obsidiandynamics/libstdgo/scribe"
)

type job struct {
	Name             string `json:"name"`
	BootstrapServers string `json:"bootstrap_servers"`
	Database         string `json:"database"`
}

func endWithParent() {
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(3)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func main() {
	var given job
	check(json.Unmarshal([]byte(os.Args[1]), &given))
	go endWithParent()
	quiet := scribe.New(scribe.StandardBinding())
	quiet.SetEnabled(scribe.Error)
	harvest, err := goharvest.New(goharvest.Config{
		BaseKafkaConfig: goharvest.KafkaConfigMap{"bootstrap.servers": given.BootstrapServers},
		LeaderTopic:     given.Name + "-leader",
		LeaderGroupID:   given.Name,
		DataSource:      given.Database,
		Scribe:          quiet,
	})
	check(err)
	check(harvest.Start())
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		harvest.Stop()
	}()
	check(harvest.Await())
}
