// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

// TestCheck: a check has the error of a commit, and changes nothing.
func TestCheck(t *testing.T) {
	namespace(t)
	c := dial(t)
	before := assert.Must(c.Generation())(t)
	var sound, refused Batch
	for _, b := range []*Batch{&sound, &refused} {
		b.AddTable(IPv4, "t")
		b.AddSet(IPv4, "t", AddressRanges(IPv4, "s"))
	}
	refused.AddElements(IPv4, "t", "other", many(IPv4, 3))
	for range 2 {
		assert.NoError(t, c.Check(&sound))
		if e, is := errors.AsType[*Error](c.Check(&refused)); !is || e.Errno != unix.ENOENT || !strings.Contains(e.Op, "other") {
			t.Errorf("got %v", e)
		}
	}
	if _, err := c.Table(IPv4, "t"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the table exists: %v", err)
	}
	assert.Equal(t, "generation", assert.Must(c.Generation())(t), before)
	commit(t, c, &sound)
}

// TestLongBatch: a long batch fits where the process may have a large buffer, and is refused where it may
// not.
func TestLongBatch(t *testing.T) {
	namespace(t)
	c := dial(t)
	before := assert.Must(c.Generation())(t)
	var b Batch
	b.AddTable(IPv6, "t")
	b.AddSet(IPv6, "t", AddressRanges(IPv6, "s"))
	const _ int32 = 2 * sendBuffer // as Linux computes it, before 5.1 without a look at the sign
	for b.w.err == nil && len(b.w.b) <= 2*receiveBuffer {
		b.AddElements(IPv6, "t", "s", many(IPv6, 10_000))
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has, less [2]unix.CapUserData
	assert.NoError(t, unix.Capget(&header, &has[0]))
	less = has
	less[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&header, &less[0]); err != nil { // of this thread, which ends with the test
		t.Fatal(err)
	}
	if err := dial(t).Commit(&b); !errors.Is(err, unix.EMSGSIZE) || !strings.Contains(err.Error(), "net.core.wmem_max") {
		t.Errorf("without privilege: %v", err)
	}
	assert.NoError(t, unix.Capset(&header, &has[0]))
	if unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, sendBuffer) == nil { // in no user namespace
		commit(t, c, &b)
		return
	}
	assert.Equal(t, "generation", assert.Must(c.Generation())(t), before)
}

// TestNamespace: the cookie is that of the namespace, whatever the socket. Older kernels have none.
func TestNamespace(t *testing.T) {
	namespace(t)
	if sandbox.KernelBefore(5, 14) {
		if cookie, err := dial(t).Namespace(); !errors.Is(err, unix.ENOPROTOOPT) {
			t.Errorf("got %d, %v", cookie, err)
		}
		return
	}
	one := assert.Must(dial(t).Namespace())(t)
	if same := assert.Must(dial(t).Namespace())(t); same != one || one == 0 {
		t.Errorf("cookies %d and %d in one namespace", one, same)
	}
	t.Run("another", func(t *testing.T) {
		namespace(t)
		if other := assert.Must(dial(t).Namespace())(t); other == one {
			t.Errorf("cookie %d in two namespaces", one)
		}
	})
}

// TestRefusedOperations looks at what an error says and that nothing of the
// batch was applied, and goes on with the same connection.
func TestRefusedOperations(t *testing.T) {
	namespace(t)
	c := dial(t)
	var b Batch
	b.AddTable(IPv4, "t")
	b.AddChain(IPv4, "t", "c", nil)
	b.AddSet(IPv4, "t", AddressRanges(IPv4, "s"))
	b.AddElements(IPv4, "t", "s", []netipx.IPRange{span("10.0.0.0", "10.255.255.255")})
	commit(t, c, &b)
	noSet := []Expr{Immediate{Dreg: Reg1, Data: make([]byte, 4)}, Lookup{Set: "none", Sreg: Reg1}}
	elements := append(many(IPv6, 600), span("10.5.0.0", "10.5.255.255"))
	for i := range elements[:600] {
		elements[i] = netipx.IPRangeFrom(netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 0}), netip.AddrFrom4([4]byte{11, byte(i >> 8), byte(i), 9}))
	}
	for _, tt := range []struct {
		want  string
		errno error
		add   func(b *Batch)
	}{
		{"add rule to ip t c: no such file or directory", os.ErrNotExist, func(b *Batch) { b.AddRule(IPv4, "t", "c", noSet, "") }},
		{"add rule to ip t none: no such file or directory", os.ErrNotExist, func(b *Batch) { b.AddRule(IPv4, "t", "none", nil, "") }},
		{"add chain ip none c: no such file or directory", os.ErrNotExist, func(b *Batch) { b.AddChain(IPv4, "none", "c", nil) }},
		{"add chain ip t b: no such file or directory", os.ErrNotExist, func(b *Batch) { b.AddChain(IPv4, "t", "b", &Base{Type: "nonsense"}) }},
		{"add elements to set ip t s: file exists", os.ErrExist, func(b *Batch) { b.AddElements(IPv4, "t", "s", elements) }},
		{"delete elements of set ip t s: no such file or directory", os.ErrNotExist, func(b *Batch) {
			b.DeleteElements(IPv4, "t", "s", []netipx.IPRange{span("10.0.0.0", "10.0.0.255")})
		}},
		{"delete rule of ip t c: no such file or directory", os.ErrNotExist, func(b *Batch) { b.DeleteRule(IPv4, "t", "c", 4711) }},
		{"delete set ip t none: no such file or directory", os.ErrNotExist, func(b *Batch) { b.DeleteSet(IPv4, "t", "none") }},
		{"delete table ip none: no such file or directory", os.ErrNotExist, func(b *Batch) { b.DeleteTable(IPv4, "none") }},
	} {
		before := assert.Must(c.Generation())(t)
		for _, last := range []bool{false, true} {
			var b Batch
			b.AddTable(IPv4, "new")
			tt.add(&b)
			if !last {
				b.AddChain(IPv4, "new", "behind", nil)
				b.AddRule(IPv4, "new", "nowhere", nil, "")
			}
			err := c.Commit(&b)
			if err == nil || !strings.HasPrefix(err.Error(), "commit nf_tables batch: "+tt.want) || !errors.Is(err, tt.errno) {
				t.Errorf("got %v, want %s", err, tt.want)
			}
		}
		if _, err := c.Table(IPv4, "new"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: but the table before it is there: %v", tt.want, err)
		}
		assert.Equal(t, tt.want+": generation", assert.Must(c.Generation())(t), before)
	}
}

// TestManyRefusals has the kernel send more errors than fit a small buffer.
func TestManyRefusals(t *testing.T) {
	namespace(t)
	for _, buffer := range []int{receiveBuffer, 1} {
		c := dial(t)
		assert.NoError(t, unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer))
		var b Batch
		b.AddTable(IPv4, "t")
		for i := range 2000 {
			b.AddRule(IPv4, "t", fmt.Sprint("c", i), nil, "so that there is something to send back")
		}
		err := c.Commit(&b)
		if e, ok := errors.AsType[*Error](err); !ok || e.Op != "commit nf_tables batch: add rule to ip t c0" {
			t.Fatalf("buffer of %d: got %v", buffer, err)
		}
		if _, err := c.Table(IPv4, "t"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("buffer of %d: got %v", buffer, err)
		}
	}
}

// FlushSet deletes all elements of a set.
func (b *Batch) FlushSet(family Family, table, set string) {
	b.begin(operation{"flush set", family, table, set}, unix.NFT_MSG_DELSETELEM, 0, unix.NFTA_SET_ELEM_LIST_SET)
	b.end()
}
