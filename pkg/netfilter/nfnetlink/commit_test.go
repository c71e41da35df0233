// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go4.org/netipx"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/sandbox"
)

// rangesOf reads a set as a caller would.
func rangesOf(t testing.TB, c *Conn, family Family, name string) []netipx.IPRange {
	t.Helper()
	_, ranges, err := c.Ranges(family, "t", name)
	if err != nil {
		t.Fatal(err)
	}
	return ranges
}

func equalRanges(t testing.TB, want, got []netipx.IPRange) {
	t.Helper()
	if !slices.Equal(want, got) {
		t.Fatalf("got %d ranges, want %d:\n%s", len(got), len(want), cmp.Diff(want[:min(len(want), 10)], got[:min(len(got), 10)], cmp.Comparer(sameRange)))
	}
}

func TestSets(t *testing.T) {
	namespace(t)
	c := dial(t)
	for _, f := range families {
		var b Batch
		b.AddTable(f.family, "t")
		b.AddSet(f.family, "t", AddressRanges(f.family, "one"))
		b.AddSet(f.family, "t", AddressRanges(f.family, "two"))
		commit(t, c, &b)
		sets := must[[]Set](t)(c.Sets(f.family, "t"))
		if len(sets) != 2 {
			t.Fatalf("%s: sets %+v", f.family, sets)
		}
		for i, name := range []string{"one", "two"} {
			length := map[uint32]uint32{TypeIPv4: 4, TypeIPv6: 16}[f.keyType]
			want := Set{Name: name, Flags: unix.NFT_SET_INTERVAL, KeyType: f.keyType, KeyLen: length}
			if got := must[Set](t)(c.Set(f.family, "t", name)); got != want || sets[i] != want {
				t.Errorf("%s: set %+v, in the list %+v, want %+v", f.family, got, sets[i], want)
			}
		}
		if elems := must[[]element](t)(c.elements(f.family, "t", "one")); len(elems) != 0 {
			t.Errorf("%s: elements %v", f.family, elems)
		}
		b = Batch{}
		b.DeleteSet(f.family, "t", "one")
		commit(t, c, &b)
		if sets := must[[]Set](t)(c.Sets(f.family, "t")); len(sets) != 1 || sets[0].Name != "two" {
			t.Errorf("%s: sets %+v", f.family, sets)
		}
	}
}

// TestAddressPairs: a set that rules fill is read as it was written, and another form of it is named.
func TestAddressPairs(t *testing.T) {
	namespace(t)
	c := dial(t)
	for _, f := range families {
		pairs := AddressPairs(f.family, "self", 65535, time.Minute)
		var b Batch
		b.AddTable(f.family, "t")
		b.AddSet(f.family, "t", pairs)
		commit(t, c, &b)
		got := must[Set](t)(c.Set(f.family, "t", "self"))
		if diff := cmp.Diff(pairs, got); diff != "" || got.Deviation(pairs) != "" {
			t.Errorf("%s: %q (-want +got):\n%s", f.family, got.Deviation(pairs), diff)
		}
		want := fmt.Sprintf("flags timeout,dynamic, size 65535, timeout 1m0s, keys of %d bytes and type %d", pairs.KeyLen, pairs.KeyType)
		if text := got.Deviation(AddressRanges(f.family, "")); text != want {
			t.Errorf("%s: deviation %q, want %q", f.family, text, want)
		}
	}
}

func TestElements(t *testing.T) {
	namespace(t)
	c := dial(t)
	var b Batch
	b.AddTable(IPv4, "t")
	b.AddSet(IPv4, "t", AddressRanges(IPv4, "s"))
	want := []netipx.IPRange{
		span("0.0.0.0", "0.255.255.255"), span("1.0.0.0", "1.0.0.0"), span("1.0.0.1", "1.0.0.9"),
		span("10.0.0.0", "10.255.255.255"), span("240.0.0.0", "255.255.255.255"),
	}
	b.AddElements(IPv4, "t", "s", want)
	commit(t, c, &b)
	equalRanges(t, want, rangesOf(t, c, IPv4, "s"))

	// A delta: less of one, more of another; what is there already is no error.
	b = Batch{}
	b.DeleteElements(IPv4, "t", "s", []netipx.IPRange{want[1], want[4]})
	b.AddElements(IPv4, "t", "s", []netipx.IPRange{span("192.168.0.0", "192.168.255.255"), want[3]})
	commit(t, c, &b)
	want = []netipx.IPRange{want[0], want[2], want[3], span("192.168.0.0", "192.168.255.255")}
	equalRanges(t, want, rangesOf(t, c, IPv4, "s"))

	// Everything, in the commit that takes away what overlaps.
	b = Batch{}
	b.FlushSet(IPv4, "t", "s")
	b.AddElements(IPv4, "t", "s", []netipx.IPRange{span("0.0.0.0", "255.255.255.255")})
	commit(t, c, &b)
	equalRanges(t, []netipx.IPRange{span("0.0.0.0", "255.255.255.255")}, rangesOf(t, c, IPv4, "s"))
}

// TestCheck: a check has the error of a commit, and changes nothing.
func TestCheck(t *testing.T) {
	namespace(t)
	c := dial(t)
	before := must[uint32](t)(c.Generation())
	var sound, refused Batch
	for _, b := range []*Batch{&sound, &refused} {
		b.AddTable(IPv4, "t")
		b.AddSet(IPv4, "t", AddressRanges(IPv4, "s"))
	}
	refused.AddElements(IPv4, "t", "other", many(IPv4, 3))
	for range 2 {
		if err := c.Check(&sound); err != nil {
			t.Error(err)
		}
		if e, is := errors.AsType[*Error](c.Check(&refused)); !is || e.Errno != unix.ENOENT || !strings.Contains(e.Op, "other") {
			t.Errorf("got %v", e)
		}
	}
	if _, err := c.Table(IPv4, "t"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the table exists: %v", err)
	}
	if after := must[uint32](t)(c.Generation()); after != before {
		t.Errorf("generation %d became %d", before, after)
	}
	commit(t, c, &sound)
}

// TestReserve: a batch that is longer than the buffer fits where the process may have a
// larger one, and is refused where it may not.
func TestReserve(t *testing.T) {
	namespace(t)
	c := dial(t)
	before := must[uint32](t)(c.Generation())
	var b Batch
	b.AddTable(IPv6, "t")
	b.AddSet(IPv6, "t", AddressRanges(IPv6, "s"))
	for b.w.err == nil && len(b.w.b) <= 2*socketBuffer {
		b.AddElements(IPv6, "t", "s", many(IPv6, 10_000))
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has, less [2]unix.CapUserData
	if err := unix.Capget(&header, &has[0]); err != nil {
		t.Fatal(err)
	}
	less = has
	less[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&header, &less[0]); err != nil { // of this thread, which ends with the test
		t.Fatal(err)
	}
	if err := c.Reserve(&b); !errors.Is(err, unix.EMSGSIZE) || !strings.Contains(err.Error(), "net.core.wmem_max") {
		t.Errorf("without privilege: %v", err)
	}
	if err := unix.Capset(&header, &has[0]); err != nil {
		t.Fatal(err)
	}
	if unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, socketBuffer) == nil { // in no user namespace
		if err := c.Reserve(&b); err != nil {
			t.Error(err)
		}
		commit(t, c, &b)
		return
	}
	if now := must[uint32](t)(c.Generation()); now != before {
		t.Errorf("generation %d to %d", before, now)
	}
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
	one := must[uint64](t)(dial(t).Namespace())
	if same := must[uint64](t)(dial(t).Namespace()); same != one || one == 0 {
		t.Errorf("cookies %d and %d in one namespace", one, same)
	}
	t.Run("another", func(t *testing.T) {
		namespace(t)
		if other := must[uint64](t)(dial(t).Namespace()); other == one {
			t.Errorf("cookie %d in two namespaces", one)
		}
	})
}

func TestGeneration(t *testing.T) {
	namespace(t)
	c, other := dial(t), dial(t)
	var add, change Batch
	add.AddTable(IPv4, "t")
	change.AddChain(IPv4, "t", "c", nil)

	before := must[uint32](t)(c.Generation())
	if before == 0 {
		t.Error("the generation is 0, which means none")
	}
	commit(t, c, &add)
	after := must[uint32](t)(c.Generation())
	if after == before {
		t.Error("a commit left the generation alone")
	}
	must[Table](t)(c.Table(IPv4, "t"))
	must[[]Chain](t)(c.Chains(IPv4, "t"))
	must[[]Rule](t)(c.Rules(IPv4, "t", ""))
	commit(t, c, &Batch{})
	if again := must[uint32](t)(c.Generation()); again != after {
		t.Errorf("reading moved the generation from %d to %d", after, again)
	}

	// Of two that read the same generation one can commit.
	change.Generation = after
	late := change
	late.w.b, late.ops = slices.Clone(change.w.b), slices.Clone(change.ops)
	late.AddChain(IPv4, "t", "late", nil)
	commit(t, other, &change)
	if err := c.Commit(&late); !errors.Is(err, ErrStale) {
		t.Fatalf("late commit: %v", err)
	}
	if _, err := c.Chain(IPv4, "t", "late"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("chain of the late commit: %v", err)
	}
	late.Generation = must[uint32](t)(c.Generation())
	commit(t, c, &late)
	must[Chain](t)(c.Chain(IPv4, "t", "late"))
	late.Generation = 0
	commit(t, c, &late)
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
		{"flush set ip t none: no such file or directory", os.ErrNotExist, func(b *Batch) { b.FlushSet(IPv4, "t", "none") }},
		{"delete table ip none: no such file or directory", os.ErrNotExist, func(b *Batch) { b.DeleteTable(IPv4, "none") }},
	} {
		before := must[uint32](t)(c.Generation())
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
		if after := must[uint32](t)(c.Generation()); after != before {
			t.Errorf("%s: the generation moved from %d to %d", tt.want, before, after)
		}
	}
}

// TestManyRefusals has the kernel send more errors than fit a small buffer.
func TestManyRefusals(t *testing.T) {
	namespace(t)
	for _, buffer := range []int{socketBuffer, 1} {
		c := dial(t)
		if err := unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_RCVBUF, buffer); err != nil {
			t.Fatal(err)
		}
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
	b.add(operation{"flush set", family, table, set}, unix.NFT_MSG_DELSETELEM, 0, unix.NFTA_SET_ELEM_LIST_SET, nil)
}
