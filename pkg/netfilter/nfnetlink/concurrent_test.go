// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSnapshot reads a chain and a set while another connection exchanges all
// that is in them, once a snapshot. What a snapshot has is of one commit.
func TestSnapshot(t *testing.T) {
	namespace(t)
	c, writer := dial(t), dial(t)
	const size = 400
	batches := make([]Batch, 2)
	for i := range batches {
		b := &batches[i]
		b.AddTable(IPv4, "t")
		b.AddChain(IPv4, "t", "c", nil)
		b.AddSet(IPv4, "t", "s", TypeIPv4)
		b.FlushChain(IPv4, "t", "c")
		b.FlushSet(IPv4, "t", "s")
		for range size {
			b.AddRule(IPv4, "t", "c", []Expr{Counter{}, Verdict{Code: Return}}, fmt.Sprint("batch ", i))
		}
		b.AddElements(IPv4, "t", "s", many(IPv4, 2*size)[i*size:][:size])
	}
	commit(t, c, &batches[0])
	kick, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(stopped)
		i := 1
		for range kick {
			if err := writer.Commit(&batches[i%2]); err != nil {
				stopped <- err
				return
			}
			i++
		}
	}()
	t.Cleanup(func() {
		close(kick)
		if err := <-stopped; err != nil {
			t.Error(err)
		}
	})
	for range 100 {
		// Begin in the middle of a commit: when the generation has just moved.
		before := must[uint32](t)(c.Generation())
		for asked, now := kick, before; now == before; now = must[uint32](t)(c.Generation()) {
			select {
			case asked <- struct{}{}:
				asked = nil // once
			case err := <-stopped:
				t.Fatal(err)
			default:
			}
		}
		var rules []Rule
		var ranges []Range
		generation, err := c.Snapshot(func() error {
			var err error
			if rules, err = c.Rules(IPv4, "t", "c"); err != nil {
				return err
			}
			elems, err := c.Elements(IPv4, "t", "s")
			if err != nil {
				return err
			}
			ranges, err = interval(4).Ranges(elems)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		if generation == before {
			t.Fatalf("a snapshot of generation %d, which is past", generation)
		}
		if len(rules) != size {
			t.Fatalf("%d rules", len(rules))
		}
		which := 0
		if rules[0].Comment == "batch 1" {
			which = 1
		}
		for _, r := range rules {
			if r.Comment != rules[0].Comment {
				t.Fatalf("%s and %s in one list", rules[0].Comment, r.Comment)
			}
		}
		equalRanges(t, many(IPv4, 2*size)[which*size:][:size], ranges)
	}
}

func TestSnapshotErrors(t *testing.T) {
	namespace(t)
	c, other := dial(t), dial(t)
	var b Batch
	b.AddTable(IPv4, "t")
	before := must[uint32](t)(c.Generation())
	commit(t, other, &b)
	if err := c.settle(before); !errors.Is(err, ErrStale) {
		t.Errorf("settle at an old generation: %v", err)
	}
	now := must[uint32](t)(c.Generation())
	if err := c.settle(now); err != nil {
		t.Errorf("settle: %v", err)
	}
	_, err := c.Snapshot(func() error { _, err := c.Table(IPv4, "none"); return err })
	if !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error of read: %v", err)
	}
	if after := must[uint32](t)(c.Generation()); after != now {
		t.Errorf("the generation moved from %d to %d", now, after)
	}
	reads := 0
	_, err = c.Snapshot(func() error {
		reads++
		var b Batch
		b.AddTable(IPv4, fmt.Sprint("t", reads))
		return other.Commit(&b)
	})
	if !errors.Is(err, ErrInterrupted) || reads != listAttempts {
		t.Errorf("after %d reads: %v", reads, err)
	}
}

// TestInterruptedDump plays the kernel: what is marked as interrupted is read
// again, a limited number of times, and never handed out.
func TestInterruptedDump(t *testing.T) {
	for _, tt := range []struct {
		name  string
		reply func(attempt int) (flags uint16, generations []uint16)
		tries int
		err   error
	}{
		{"at once", func(int) (uint16, []uint16) { return 0, []uint16{7, 7} }, 1, nil},
		{"third time", func(n int) (uint16, []uint16) {
			if n < 3 {
				return unix.NLM_F_DUMP_INTR, []uint16{7, 7}
			}
			return 0, []uint16{8, 8}
		}, 3, nil},
		{"never", func(int) (uint16, []uint16) { return unix.NLM_F_DUMP_INTR, []uint16{7} }, listAttempts, ErrInterrupted},
		{"generation moved", func(n int) (uint16, []uint16) { return 0, []uint16{7, min(uint16(n)+5, 7)} }, 2, nil},
		{"generation moves on", func(int) (uint16, []uint16) { return 0, []uint16{7, 8} }, listAttempts, nil},
	} {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		c := newConn(pair[0])
		tries := make(chan int)
		go func() { tries <- playKernel(t, pair[1], tt.reply) }()

		rules, err := c.Rules(IPv4, "t", "")
		if !errors.Is(err, tt.err) {
			t.Errorf("%s: %v", tt.name, err)
		}
		if err == nil && len(rules) != 2 {
			t.Errorf("%s: %d rules, want those of the last attempt", tt.name, len(rules))
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if n := <-tries; n != tt.tries {
			t.Errorf("%s: %d attempts, want %d", tt.name, n, tt.tries)
		}
		if err := unix.Close(pair[1]); err != nil {
			t.Error(err)
		}
	}
}

// playKernel answers requests with a rule for each generation, the last message
// marked with the flags, and an answer to nobody's request before. It returns
// the number of requests.
func playKernel(t *testing.T, fd int, reply func(attempt int) (uint16, []uint16)) int {
	request := make([]byte, datagramSize)
	for attempt := 1; ; attempt++ {
		n, err := unix.Read(fd, request)
		if err != nil || n == 0 {
			return attempt - 1
		}
		it := messageIter{rest: request[:n]}
		if !it.next() {
			t.Error("no request")
			return attempt
		}
		flags, generations := reply(attempt)
		send := func(typ, flags, generation uint16, sequence uint32, rest []byte) {
			var w attrWriter
			at := w.beginMessage(typ, flags|unix.NLM_F_MULTI, IPv4, generation)
			w.b = append(w.b, rest...)
			w.endMessage(at)
			setSequence(w.b, sequence)
			if _, err := unix.Write(fd, w.b); err != nil {
				t.Error(err)
			}
		}
		rule := encodeRule(t, "c", nil, "")
		send(messageType(unix.NFT_MSG_NEWRULE), unix.NLM_F_DUMP_INTR, 3, it.sequence-1, rule)
		for _, g := range generations {
			send(messageType(unix.NFT_MSG_NEWRULE), 0, g, it.sequence, rule)
		}
		// The nfgenmsg stands where the error number of NLMSG_DONE does, so it is 0.
		done := attrWriter{}
		at := done.beginMessage(unix.NLMSG_DONE, flags|unix.NLM_F_MULTI, 0, 0)
		done.endMessage(at)
		setSequence(done.b, it.sequence)
		if _, err := unix.Write(fd, done.b); err != nil {
			t.Error(err)
		}
	}
}

// TestErrorTexts has the parts of an error in a form that people can act on.
func TestErrorTexts(t *testing.T) {
	for want, err := range map[string]*Error{
		"add chain ip t c: operation not supported (no such type)":                                        {Op: "add chain ip t c", Errno: unix.EOPNOTSUPP, Message: "no such type"},
		"read table ip t: operation not permitted; it needs CAP_NET_ADMIN over the network namespace":     {Op: "read table ip t", Errno: unix.EPERM},
		"commit: interrupted system call should be restarted; somebody else changed the rules in between": {Op: "commit", Errno: unix.ERESTART},
	} {
		if got := err.Error(); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
	if got := (operation{"list rules of", Family(7), "t", ""}).String(); !strings.Contains(got, "family-7") {
		t.Errorf("got %s", got)
	}
}
