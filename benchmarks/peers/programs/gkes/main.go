// The account workload by the ancestor, with its own defaults: pool of three producers, 1,000 events or 10 ms per
// transaction. The first argument is the job as JSON; its options are told in benchmarks/peers/gkes.py. Ends on SIGTERM,
// and at once when its standard input ends.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/aws/go-kafka-event-source/streams"
	jsoniter "github.com/json-iterator/go"
)

type job struct {
	BootstrapServers string            `json:"bootstrap_servers"`
	Group            string            `json:"group"`
	Source           string            `json:"source"`
	Output           string            `json:"output"`
	Changelog        string            `json:"changelog"`
	Options          map[string]string `json:"options"`
}

type deposited struct {
	Account string  `json:"account"`
	Cents   int64   `json:"cents"`
	Sent    float64 `json:"sent"`
	Note    string  `json:"note"`
}

type balance struct {
	Account string  `json:"account"`
	Count   int64   `json:"count"`
	Cents   int64   `json:"cents"`
	Sent    float64 `json:"sent"`
}

type account struct {
	Count int64 `json:"count"`
	Cents int64 `json:"cents"`
}

// ConfigFastest would cut numbers to six digits, and a time needs more.
var fast = jsoniter.Config{}.Froze()

// The state of one partition. The store that comes with the ancestor never reads its changelog back.
type accounts struct {
	byKey map[string]*account
}

func newAccounts(streams.TopicPartition) *accounts {
	return &accounts{byKey: make(map[string]*account)}
}

// ReceiveChange takes an entry of the changelog when a partition is taken over.
func (a *accounts) ReceiveChange(record streams.IncomingRecord) error {
	if record.Value() == nil {
		delete(a.byKey, string(record.Key()))
		return nil
	}
	state := &account{}
	if err := fast.Unmarshal(record.Value(), state); err != nil {
		return err
	}
	a.byKey[string(record.Key())] = state
	return nil
}

// Revoked is called when the partition is somebody else's.
func (a *accounts) Revoked() { a.byKey = make(map[string]*account) }

func write(into *bytes.Buffer, value any) {
	encoded, err := fast.Marshal(value)
	if err != nil {
		panic(err)
	}
	into.Write(encoded)
}

func decoded(record streams.IncomingRecord) (event deposited, err error) {
	err = fast.Unmarshal(record.Value(), &event)
	return
}

func handler(output string) streams.EventProcessor[*accounts, deposited] {
	return func(ctx *streams.EventContext[*accounts], event deposited) streams.ExecutionState {
		store := ctx.Store()
		state, known := store.byKey[event.Account]
		if !known {
			state = &account{}
			store.byKey[event.Account] = state
		}
		state.Count++
		state.Cents += event.Cents
		change := streams.NewChangeLogEntry().WithEntryType("account")
		change.WriteKeyString(event.Account)
		write(change.ValueWriter(), state)
		ctx.RecordChange(change)
		record := streams.NewRecord().WithTopic(output).WithRecordType("Balance").WithKeyString(event.Account)
		write(record.ValueWriter(), balance{event.Account, state.Count, state.Cents, event.Sent})
		ctx.Forward(record)
		return streams.Complete
	}
}

func unknown(ctx *streams.EventContext[*accounts], record streams.IncomingRecord) streams.ExecutionState {
	return ctx.Fail(fmt.Errorf("an event of type %q", record.RecordType()))
}

func eosConfig(options map[string]string) streams.EosConfig {
	config := streams.DefaultEosConfig
	config.PoolSize = number(options, "pool", config.PoolSize)
	config.PendingTxnCount = number(options, "pending", config.PendingTxnCount)
	config.TargetBatchSize = number(options, "target", config.TargetBatchSize)
	config.MaxBatchSize = number(options, "max", config.MaxBatchSize)
	delay := number(options, "delay_ms", int(config.BatchDelay/time.Millisecond))
	config.BatchDelay = time.Duration(delay) * time.Millisecond
	return config
}

func number(options map[string]string, name string, otherwise int) int {
	text, told := options[name]
	if !told {
		return otherwise
	}
	value, err := strconv.Atoi(text)
	if err != nil {
		panic(err)
	}
	return value
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
	go endWithParent()
	streams.InitLogger(streams.SimpleLogger(streams.LogLevelError), streams.LogLevelError)
	source, err := streams.NewEventSource(streams.EventSourceConfig{
		GroupId:         given.Group,
		Topic:           given.Source,
		StateStoreTopic: given.Changelog,
		NumPartitions:   10,
		SourceCluster:   streams.SimpleCluster(strings.Split(given.BootstrapServers, ",")),
		EosConfig:       eosConfig(given.Options),
	}, newAccounts, unknown)
	if err != nil {
		panic(err)
	}
	streams.RegisterEventType(source, decoded, handler(given.Output), "Deposited")
	source.ConsumeEvents()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	select {
	case <-stop: // a graceful leave hands partitions over one by one, and nobody is there to take them
		source.StopNow()
	case <-source.Done():
		os.Exit(1)
	}
}
