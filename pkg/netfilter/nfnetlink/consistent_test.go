// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

func TestConsistentReadErrors(t *testing.T) {
	namespace(t)
	c, other := dial(t), dial(t)
	var b Batch
	b.AddTable(IPv4, "t")
	before := assert.Must(c.Generation())(t)
	commit(t, other, &b)
	if err := c.awaitCommit(before); !errors.Is(err, ErrStale) {
		t.Errorf("await commits at an old generation: %v", err)
	}
	now := assert.Must(c.Generation())(t)
	if err := c.awaitCommit(now); err != nil {
		t.Errorf("await commits: %v", err)
	}
	_, _, err := ConsistentRead(c, func() (Table, error) { return c.Table(IPv4, "none") }, nil)
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error of read: %v", err)
	}
	assert.Equal(t, "generation", assert.Must(c.Generation())(t), now)
}

// TestTornDump plays the kernel: ConsistentRead reads a dump again during which the generation moved, and
// takes it in the end as it is.
func TestTornDump(t *testing.T) {
	for _, tt := range []struct {
		name       string
		generation func(dump int) uint32
		dumps      int
		want       uint32
	}{
		{"at once", func(int) uint32 { return 7 }, 1, 7},
		{"generation moved", func(n int) uint32 { return min(uint32(n)+5, 8) }, 3, 8},
		{"generation moves on", func(n int) uint32 { return uint32(n) + 1 }, 51, 0},
	} {
		pair := assert.Must(unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0))(t)
		c := &Conn{fd: pair[0], in: make([]byte, datagramSize)}
		c.consistentLimit = time.Hour // the number of attempts has to end it, on a slow machine too
		dumps := make(chan int)
		go func() { dumps <- playKernel(t, pair[1], tt.generation) }()

		rules, generation, err := ConsistentRead(c, func() ([]Rule, error) { return c.Rules(IPv4, "t", "") }, nil)
		if err != nil || generation != tt.want {
			t.Errorf("%s: generation %d, %v; want %d", tt.name, generation, err, tt.want)
		}
		assert.Equal(t, tt.name+": rules of the last attempt", len(rules), 2)
		assert.NoError(t, c.Close())
		assert.Equal(t, tt.name+": dumps", <-dumps, tt.dumps)
		assert.NoError(t, unix.Close(pair[1]))
	}
}

// playKernel answers requests: for the generation with the one at the next dump, for a dump with an answer
// to an earlier request and then two rules. It returns the number of dumps.
func playKernel(t *testing.T, fd int, generation func(dump int) uint32) (dumps int) {
	request := make([]byte, datagramSize)
	for {
		n, err := unix.Read(fd, request)
		if err != nil || n == 0 {
			return dumps
		}
		m, _, ok := cutMessage(request[:n])
		if !ok {
			t.Error("no request")
			return dumps
		}
		send := func(typ uint16, sequence uint32, header, rest []byte) {
			var w attrWriter
			w.endMessage(w.beginMessage(typ, unix.NLM_F_MULTI, slices.Concat(header, rest)))
			binary.NativeEndian.PutUint32(w.b[sequenceAt:], sequence)
			if _, err := unix.Write(fd, w.b); err != nil {
				t.Error(err)
			}
		}
		switch m.typ {
		case messageType(unix.NFT_MSG_GETGEN):
			var w attrWriter
			w.u32(unix.NFTA_GEN_ID, generation(dumps+1))
			send(messageType(unix.NFT_MSG_NEWGEN), m.sequence, nfgenmsg(IPv4), w.b)
		case messageType(unix.NFT_MSG_GETRULE):
			dumps++
			rule := encodeRule(t, "c", nil, "")
			send(messageType(unix.NFT_MSG_NEWRULE), m.sequence-1, nfgenmsg(IPv4), rule)
			for range 2 {
				send(messageType(unix.NFT_MSG_NEWRULE), m.sequence, nfgenmsg(IPv4), rule)
			}
			send(unix.NLMSG_DONE, m.sequence, make([]byte, 4), nil)
		}
	}
}

// TestErrorTexts has the parts of an error in a form that people can act on.
func TestErrorTexts(t *testing.T) {
	for want, err := range map[string]*Error{
		"read table ip t: operation not permitted; it needs CAP_NET_ADMIN over the network namespace":       {Op: "read table ip t", Errno: unix.EPERM},
		"commit: interrupted system call should be restarted; another program changed the rules in between": {Op: "commit", Errno: unix.ERESTART},
	} {
		assert.Equal(t, "error", err.Error(), want)
	}
	if got := (operation{"list rules of", Family(7), "t", ""}).String(); !strings.Contains(got, "family-7") {
		t.Errorf("got %s", got)
	}
}
