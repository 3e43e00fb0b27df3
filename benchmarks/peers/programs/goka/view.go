package main

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash"
	"os"
	"strings"
	"time"

	"github.com/lovoo/goka"
	"github.com/lovoo/goka/storage"
)

// As in benchmarks/views/work.py, which does the same.
const (
	gets = 200_000
	poll = 500 * time.Microsecond
	sent = "sent"
)

type price struct {
	Cents    int64  `json:"cents"`
	Currency string `json:"currency"`
	Note     string `json:"note"`
}

type watched struct {
	Rate  float64    `json:"rate"`
	GetUs float64    `json:"get_us"`
	Seen  [][2]int64 `json:"seen"`
	Rows  int64      `json:"rows"`
	Cents int64      `json:"cents"`
}

// The hash of Kafka's Java clients: goka's own would look for keys in other partitions than those they were sent to.
type murmur2 struct{ key []byte }

func newMurmur2() hash.Hash32 { return &murmur2{} }

func (m *murmur2) Write(part []byte) (int, error) {
	m.key = append(m.key, part...)
	return len(part), nil
}

func (m *murmur2) Sum32() uint32 {
	const mix = 0x5bd1e995
	rest := m.key
	h := 0x9747b28c ^ uint32(len(rest))
	for ; len(rest) >= 4; rest = rest[4:] {
		k := binary.LittleEndian.Uint32(rest) * mix
		h = h*mix ^ (k^k>>24)*mix
	}
	if len(rest) > 0 {
		for place, one := range rest {
			h ^= uint32(one) << (8 * place)
		}
		h *= mix
	}
	h = (h ^ h>>13) * mix
	return (h ^ h>>15) & 0x7fffffff
}

func (m *murmur2) Sum(to []byte) []byte { return binary.BigEndian.AppendUint32(to, m.Sum32()) }
func (m *murmur2) Reset()               { m.key = m.key[:0] }
func (m *murmur2) Size() int            { return 4 }
func (m *murmur2) BlockSize() int       { return 4 }

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func at(view *goka.View, key string) *price {
	value, err := view.Get(key)
	check(err)
	found, _ := value.(*price)
	return found
}

// Catches up, gets, then polls until the last record is there; prints what it found.
func watch(given job, builder storage.Builder) {
	found := watched{Seen: [][2]int64{}}
	began := time.Now()
	view, err := goka.NewView(strings.Split(given.BootstrapServers, ","), goka.Table(given.Table), codec[price]{},
		goka.WithViewStorageBuilder(builder), goka.WithViewHasher(newMurmur2))
	check(err)
	go func() {
		check(view.Run(context.Background()))
	}()
	<-view.WaitRunning()
	found.Rate = float64(given.Keys) / time.Since(began).Seconds()
	names := make([]string, gets)
	for number := range names {
		names[number] = fmt.Sprintf("key-%07d", number*7919%given.Keys)
	}
	began = time.Now()
	for _, name := range names {
		if at(view, name) == nil {
			panic("no row of " + name)
		}
	}
	found.GetUs = time.Since(began).Seconds() / gets * 1e6
	check(os.WriteFile(given.Ready, nil, 0o600))
	for newest := given.First - 1; newest < given.Last; time.Sleep(poll) {
		row := at(view, sent)
		now := time.Now().UnixNano()
		if row != nil && -1-row.Cents >= given.First && -1-row.Cents != newest {
			newest = -1 - row.Cents
			found.Seen = append(found.Seen, [2]int64{newest, now})
		}
	}
	rows, err := view.Iterator()
	check(err)
	for rows.Next() {
		value, err := rows.Value()
		check(err)
		found.Rows++
		found.Cents += value.(*price).Cents
	}
	check(rows.Err())
	rows.Release()
	check(json.NewEncoder(os.Stdout).Encode(found))
}
