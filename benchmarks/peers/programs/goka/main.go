// Orders joined with the rows of their customers by goka, at least once, or a view of a table (view.go), with its own
// defaults; rows in memory. The first argument is the job as JSON. Ends on SIGTERM, and at once when its standard input
// ends.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/IBM/sarama"
	jsoniter "github.com/json-iterator/go"
	"github.com/lovoo/goka"
	"github.com/lovoo/goka/storage"
)

type job struct {
	BootstrapServers string            `json:"bootstrap_servers"`
	Group            string            `json:"group"`
	Source           string            `json:"source"`
	Output           string            `json:"output"`
	Table            string            `json:"table"`
	Keys             int               `json:"keys"` // of a view
	First            int64             `json:"first"`
	Last             int64             `json:"last"`
	Ready            string            `json:"ready"`
	Options          map[string]string `json:"options"`
}

type ordered struct {
	Customer string `json:"customer"`
	Number   int64  `json:"number"`
	Cents    int64  `json:"cents"`
	Note     string `json:"note"`
}

type customer struct {
	Version int64  `json:"version"`
	Address string `json:"address"`
}

// Version -1: there was no row.
type invoiced struct {
	Customer string `json:"customer"`
	Number   int64  `json:"number"`
	Cents    int64  `json:"cents"`
	Version  int64  `json:"version"`
	Address  string `json:"address"`
}

var fast = jsoniter.Config{}.Froze()

// JSON of one type, by a codec of goka.
type codec[T any] struct{}

func (codec[T]) Encode(value any) ([]byte, error) { return fast.Marshal(value) }

func (codec[T]) Decode(data []byte) (any, error) {
	value := new(T)
	return value, fast.Unmarshal(data, value)
}

func handler(given job) goka.ProcessCallback {
	table, output := goka.Table(given.Table), goka.Stream(given.Output)
	headers := goka.WithCtxEmitHeaders(goka.Headers{"__grt__": []byte("Invoiced")})
	return func(ctx goka.Context, message any) {
		if kind := string(ctx.Headers()["__grt__"]); kind != "Ordered" {
			ctx.Fail(fmt.Errorf("an event of type %q", kind))
		}
		order := message.(*ordered)
		invoice := invoiced{order.Customer, order.Number, order.Cents, -1, ""}
		if row, found := ctx.Join(table).(*customer); found {
			invoice.Version, invoice.Address = row.Version, row.Address
		}
		ctx.Emit(output, order.Customer, &invoice, headers)
	}
}

func endWithParent() {
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(3)
}

func main() {
	var given job
	if err := json.Unmarshal([]byte(os.Args[1]), &given); err != nil {
		panic(err)
	}
	if given.Table == "" {
		log.Fatal("this program does joins and views only")
	}
	go endWithParent()
	config := goka.DefaultConfig()
	config.Consumer.Offsets.Initial = sarama.OffsetOldest // a backlog, where goka's default begins behind it
	config.Consumer.IsolationLevel = sarama.ReadCommitted // the backlog is one transaction
	goka.ReplaceGlobalConfig(config)
	builder := storage.MemoryBuilder()
	if given.Options["storage"] == "leveldb" {
		builder = storage.DefaultBuilder(os.Getenv("BENCH_SCRATCH"))
	}
	if given.Ready != "" {
		watch(given, builder)
		return
	}
	group := goka.DefineGroup(
		goka.Group(given.Group),
		goka.Input(goka.Stream(given.Source), codec[ordered]{}, handler(given)),
		goka.Join(goka.Table(given.Table), codec[customer]{}),
		goka.Output(goka.Stream(given.Output), codec[invoiced]{}),
	)
	processor, err := goka.NewProcessor(strings.Split(given.BootstrapServers, ","), group, goka.WithStorageBuilder(builder))
	if err != nil {
		panic(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := processor.Run(ctx); err != nil {
		log.Fatal(err)
	}
}
