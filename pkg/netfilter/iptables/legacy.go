// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"math/bits"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// LegacyChain is a chain of a table of iptables-legacy.
type LegacyChain struct {
	Name string
	// Rules are the expressions that iptables-nft would write. What it cannot
	// write is Unknown. The policy of a built-in chain is not among the rules.
	Rules []nfnetlink.Rule
}

// Legacy returns all chains of a table of iptables-legacy; none if the table is
// not in use. It creates no table, runs no program and takes no lock: the kernel
// replaces a table as a whole.
func Legacy(f policy.Family, tableName string) ([]LegacyChain, error) {
	s, err := readLegacy(f, tableName)
	if err != nil {
		return nil, err
	}
	var chains []LegacyChain
	for c := range s.chains() {
		rules := make([]nfnetlink.Rule, c.end-c.first)
		for i := range rules {
			rules[i] = nfnetlink.Rule{Chain: string(c.name), Exprs: s.expressions(nil, c.first+i)}
		}
		chains = append(chains, LegacyChain{string(c.name), rules})
	}
	return chains, nil
}

// readLegacyNAT reads POSTROUTING and the named chains of table nat.
func readLegacyNAT(f policy.Family, names []string) (table, error) {
	s, err := readLegacy(f, natTable)
	if err != nil {
		return table{}, err
	}
	return s.table(names)
}

func (s *legacyTable) table(names []string) (table, error) {
	var t table
	found := map[string]legacyChain{}
	for c := range s.chains() {
		named := func(name string) bool { return name == string(c.name) }
		if c.builtIn && named(postrouting) {
			if verdict, _ := s.verdict(c.end); verdict == verdictDrop {
				t.fault = policyFault(s.family)
			}
		} else if c.builtIn || !slices.ContainsFunc(names, named) {
			continue
		}
		found[string(c.name)] = c
	}
	var buffer []nfnetlink.Expr
	err := t.read(s.family, names, func(chain string) (chainRules, error) {
		c, exists := found[chain]
		return chainRules{exists, c.end - c.first, func(i int) nfnetlink.Rule {
			buffer = s.expressions(buffer[:0], c.first+i)
			return nfnetlink.Rule{Exprs: buffer}
		}}, nil
	})
	return t, err
}

// legacyUserChains returns the names of the chains of a table that are not built in.
func legacyUserChains(f policy.Family, tableName string) ([]string, error) {
	s, err := readLegacy(f, tableName)
	if err != nil {
		return nil, err
	}
	var names []string
	for c := range s.chains() {
		if !c.builtIn {
			names = append(names, string(c.name))
		}
	}
	return names, nil
}

// legacyInUse reports whether a table of iptables-legacy exists in this network
// namespace. The file lists the existing tables; the socket options would create
// the table. (/proc/net shows the namespace of the process's first thread.)
func legacyInUse(f policy.Family, tableName string) (bool, error) {
	path := "/proc/thread-self/net/ip_tables_names"
	if f == policy.IPv6 {
		path = "/proc/thread-self/net/ip6_tables_names"
	}
	names, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) { // the kernel's module is not loaded
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("find the tables of iptables-legacy: %w; run as root", err)
	}
	return slices.Contains(strings.Fields(string(names)), tableName), nil
}

// legacyTable is a table of iptables-legacy as IPT_SO_GET_INFO and
// IPT_SO_GET_ENTRIES return it on a 64-bit machine (linux/netfilter_ipv4/ip_tables.h,
// linux/netfilter_ipv6/ip6_tables.h). The zero value is a table without chains.
type legacyTable struct {
	family  policy.Family
	layout  layout
	info    []byte         // struct ipt_getinfo
	entries []byte         // of struct ipt_get_entries
	offsets []int          // of each entry, and the end of the last one
	load    nfnetlink.Expr // the last Payload: most rules of a chain have the same
}

// Sizes and offsets in struct ipt_getinfo and struct ipt_get_entries, the same for
// both families.
const (
	nameSize        = 32 // XT_TABLE_MAXNAMELEN
	infoSize        = 84
	infoHooks       = 36 // hook_entry[NF_INET_NUMHOOKS], then underflow[NF_INET_NUMHOOKS]
	infoEntries     = 76 // num_entries
	infoEntriesSize = 80 // size
	entriesHead     = 40 // sizeof(struct ipt_get_entries)
)

// layout has the offsets in struct ipt_entry and struct ip6t_entry of a 64-bit
// kernel. The addresses come first: source, destination and their masks.
type layout struct {
	address    int // size of an address
	interfaces int // names in and out, then masks in and out, IFNAMSIZ each
	protocol   int // uint16
	flags      int // uint8
	inversions int // uint8
	gotoFlag   byte
	plainFlags byte // flags that do not narrow what the rule matches
	protoFlag  byte // IP6T_F_PROTO, without which the protocol is not compared; 0: no such flag
	targetAt   int  // uint16: offset of the target in the entry
	nextAt     int  // uint16: size of the entry
	packetsAt  int  // uint64
	size       int
}

func layoutOf(f policy.Family) layout {
	if f == policy.IPv6 {
		return layout{address: 16, interfaces: 64, protocol: 128, flags: 131, inversions: 132, gotoFlag: 0x04,
			plainFlags: 0x01 | 0x04, protoFlag: 0x01, targetAt: 140, nextAt: 142, packetsAt: 152, size: 168}
	}
	return layout{address: 4, interfaces: 16, protocol: 80, flags: 82, inversions: 83, gotoFlag: 0x02,
		plainFlags: 0x02, targetAt: 88, nextAt: 90, packetsAt: 96, size: 112}
}

// readLegacy reads a table if it is in use; otherwise the result has no chains.
func readLegacy(f policy.Family, tableName string) (*legacyTable, error) {
	const tries = 20
	used, err := legacyInUse(f, tableName)
	if err != nil || !used {
		return &legacyTable{}, err
	}
	domain, level := unix.AF_INET, unix.SOL_IP
	if f == policy.IPv6 {
		domain, level = unix.AF_INET6, unix.SOL_IPV6
	}
	// A datagram socket has these options too, and needs no CAP_NET_RAW.
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a socket for table %s: %w", tableName, err)
	}
	defer func() { _ = unix.Close(fd) }()
	// The numbers are the same for IPv6.
	const getInfo, getEntries = 64, 65
	for range tries {
		info := request(infoSize, tableName)
		if err := getsockopt(fd, level, getInfo, info); err != nil {
			return nil, fmt.Errorf("read table %s of iptables-legacy: IPT_SO_GET_INFO: %w", tableName, err)
		}
		size := binary.NativeEndian.Uint32(info[infoEntriesSize:])
		reply := request(entriesHead+int(size), tableName)
		binary.NativeEndian.PutUint32(reply[nameSize:], size)
		err := getsockopt(fd, level, getEntries, reply)
		if errors.Is(err, unix.EAGAIN) { // the table has another size by now
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read table %s of iptables-legacy: IPT_SO_GET_ENTRIES: %w", tableName, err)
		}
		again := request(infoSize, tableName)
		if err := getsockopt(fd, level, getInfo, again); err == nil && bytes.Equal(again, info) {
			return parseLegacy(f, info, reply[entriesHead:])
		}
	}
	return nil, fmt.Errorf("read table %s of iptables-legacy: it changed %d times meanwhile: %w", tableName, tries, unix.EAGAIN)
}

// request returns a buffer of the size that begins with the table's name.
func request(size int, tableName string) []byte {
	b := make([]byte, size)
	copy(b[:nameSize-1], tableName)
	return b
}

// getsockopt fills the buffer, which begins with the request.
func getsockopt(fd, level, option int, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// Sizes and offsets in struct xt_entry_match and struct xt_entry_target, the same
// for both.
const (
	extensionHead = 32
	nameAt        = 2
	revisionAt    = 31
)

var errLegacyLayout = errors.New("the kernel's reply does not have the layout of a table of iptables-legacy")

// parseLegacy finds the entries. A node's table can have tens of thousands, of
// which a dozen belong to ip-masq: only those are decoded.
func parseLegacy(f policy.Family, info, entries []byte) (*legacyTable, error) {
	s := &legacyTable{family: f, layout: layoutOf(f), info: info, entries: entries}
	if len(info) != infoSize {
		return nil, errLegacyLayout
	}
	count := int(binary.NativeEndian.Uint32(info[infoEntries:])) // not trusted
	s.offsets = make([]int, 1, 1+min(count, len(entries)/s.layout.size))
	for at := 0; at < len(entries); {
		e := entries[at:]
		if len(e) < s.layout.size {
			return nil, errLegacyLayout
		}
		target, next := int(binary.NativeEndian.Uint16(e[s.layout.targetAt:])), int(binary.NativeEndian.Uint16(e[s.layout.nextAt:]))
		if target < s.layout.size || next < target || next > len(e) {
			return nil, errLegacyLayout
		}
		if _, ok := extensionSize(e[target:next]); !ok {
			return nil, errLegacyLayout
		}
		at += next
		s.offsets = append(s.offsets, at)
	}
	return s, nil
}

// extensionSize returns the size of the match or target at the beginning of b.
func extensionSize(b []byte) (int, bool) {
	if len(b) < extensionHead {
		return 0, false
	}
	size := int(binary.NativeEndian.Uint16(b))
	return size, size >= extensionHead && size <= len(b)
}

// extension returns the name, revision and data of a match or target.
func extensionParts(b []byte) (name string, revision uint32, info []byte) {
	text, _, _ := bytes.Cut(b[nameAt:revisionAt], []byte{0})
	return string(text), uint32(b[revisionAt]), b[extensionHead:]
}

// entry returns the ith entry, and its target as a part of it.
func (s *legacyTable) entry(i int) (entry, target []byte) {
	entry = s.entries[s.offsets[i]:s.offsets[i+1]]
	target = entry[binary.NativeEndian.Uint16(entry[s.layout.targetAt:]):]
	size, _ := extensionSize(target) // parseLegacy has verified it
	return entry, target[:size]
}

// Verdicts in a struct xt_standard_target, the target without a name.
const (
	verdictDrop   = -1 // -NF_DROP - 1
	verdictAccept = -2 // -NF_ACCEPT - 1
	verdictReturn = -5 // XT_RETURN, -NF_REPEAT - 1
)

// verdict returns the verdict of the ith entry's standard target, or the offset of
// the rule to continue with.
func (s *legacyTable) verdict(i int) (int, bool) {
	_, target := s.entry(i)
	if len(target) < extensionHead+4 {
		return 0, false
	}
	return int(int32(binary.NativeEndian.Uint32(target[extensionHead:]))), true
}

// chainHead returns the name of the chain that begins after the ith entry. Such an
// entry, and the last one of the table, has the target ERROR.
func (s *legacyTable) chainHead(i int) ([]byte, bool) {
	_, target := s.entry(i)
	if !bytes.HasPrefix(target[nameAt:revisionAt], []byte("ERROR\x00")) {
		return nil, false
	}
	name, _, _ := bytes.Cut(target[extensionHead:], []byte{0})
	return name, true
}

// chainAt returns the chain whose first rule is at the offset: jumps lead there.
func (s *legacyTable) chainAt(offset int) (string, bool) {
	i, found := slices.BinarySearch(s.offsets, offset)
	if !found || i == 0 || i == len(s.offsets)-1 {
		return "", false
	}
	name, begins := s.chainHead(i - 1)
	return string(name), begins
}

// legacyChain is a chain and the numbers of its entries, without the entry that
// iptables adds at its end.
type legacyChain struct {
	name       []byte
	builtIn    bool
	first, end int
}

// builtInChains are the names of the built-in chains by the number of their hook.
func builtInChains() [5]string {
	return [...]string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", postrouting}
}

// chains yields the chains.
//
// A built-in chain begins at the offset hook_entry of its hook and ends with its
// policy, at the offset underflow. A user's chain begins after an entry with the
// target ERROR, which has its name, and ends with a rule that iptables adds. One
// more such entry ends the table.
func (s *legacyTable) chains() iter.Seq[legacyChain] {
	at := func(field, hook int) (int, bool) {
		offset := binary.NativeEndian.Uint32(s.info[infoHooks+4*(field+hook):])
		return slices.BinarySearch(s.offsets, int(offset))
	}
	return func(yield func(legacyChain) bool) {
		count := len(s.offsets) - 1
		if count < 1 {
			return
		}
		hooks := builtInChains()
		for hook, name := range hooks {
			first, begins := at(0, hook)
			end, ends := at(len(hooks), hook)
			exists := begins && ends && first <= end && end < count
			if exists && !yield(legacyChain{[]byte(name), true, first, end}) {
				return
			}
		}
		current := legacyChain{first: -1}
		for i := range count {
			name, begins := s.chainHead(i)
			if !begins {
				continue
			}
			current.end = max(i-1, current.first)
			if current.first >= 0 && !yield(current) {
				return
			}
			current = legacyChain{name: name, first: i + 1, end: i + 1}
		}
		if current.first >= 0 && current.first < count {
			yield(current) // the last entry is missing, so the chain's end is not known
		}
	}
}

// Bits of the inversions (IPT_INV_*, IP6T_INV_*).
const (
	invertIn          byte = 0x01
	invertOut         byte = 0x02
	invertSource      byte = 0x08
	invertDestination byte = 0x10
	invertProtocol    byte = 0x40
)

// expressions appends the ith entry's rule in the form in which iptables-nft would
// write it.
func (s *legacyTable) expressions(out []nfnetlink.Expr, i int) []nfnetlink.Expr {
	l := s.layout
	entry, target := s.entry(i)
	sourceAt, destinationAt := uint32(12), uint32(16)
	if s.family == policy.IPv6 {
		sourceAt, destinationAt = 8, 24
	}
	flags, invert := entry[l.flags], entry[l.inversions]
	address := func(i int) []byte { return entry[i*l.address : (i+1)*l.address] }
	name := func(i int) []byte { return entry[l.interfaces+i*unix.IFNAMSIZ : l.interfaces+(i+1)*unix.IFNAMSIZ] }

	out = s.addressExpressions(out, sourceAt, address(0), address(2), invert&invertSource != 0)
	out = s.addressExpressions(out, destinationAt, address(1), address(3), invert&invertDestination != 0)
	out = interfaceExpressions(out, unix.NFT_META_IIFNAME, name(0), name(2), invert&invertIn != 0)
	out = interfaceExpressions(out, unix.NFT_META_OIFNAME, name(1), name(3), invert&invertOut != 0)
	if number := binary.NativeEndian.Uint16(entry[l.protocol:]); number != 0 && (l.protoFlag == 0 || flags&l.protoFlag != 0) {
		out = append(out, nfnetlink.Meta{Key: unix.NFT_META_L4PROTO, Reg: nfnetlink.Reg1},
			nfnetlink.Cmp{Op: operator(invert&invertProtocol != 0), Sreg: nfnetlink.Reg1, Data: []byte{byte(number)}})
	} else if flags&l.protoFlag != 0 {
		out = append(out, nfnetlink.Unknown{Kind: "protocol 0"})
	}
	if flags&^l.plainFlags != 0 || invert&^(invertIn|invertOut|invertSource|invertDestination|invertProtocol) != 0 {
		out = append(out, nfnetlink.Unknown{Kind: "fragment or type of service"})
	}
	for rest := entry[l.size:binary.NativeEndian.Uint16(entry[l.targetAt:])]; len(rest) > 0; {
		size, ok := extensionSize(rest)
		if !ok {
			return append(out, nfnetlink.Unknown{Kind: "damaged match"})
		}
		name, revision, info := extensionParts(rest[:size])
		out = append(out, nfnetlink.Match{Xt: name, Rev: revision, Info: info})
		rest = rest[size:]
	}
	if packets := binary.NativeEndian.Uint64(entry[l.packetsAt:]); packets > 0 {
		out = append(out, nfnetlink.Counter{Packets: packets})
	}
	if name, revision, info := extensionParts(target); name != "" {
		return append(out, nfnetlink.Target{Xt: name, Rev: revision, Info: info})
	}
	return s.verdictExpression(out, i, flags&l.gotoFlag != 0)
}

func operator(inverted bool) nfnetlink.CmpOp {
	if inverted {
		return nfnetlink.NotEqual
	}
	return nfnetlink.Equal
}

// addressExpressions appends `ip saddr ADDRESS/MASK`. As iptables-nft does, it
// loads only the bytes that a prefix reaches if it ends at a byte.
func (s *legacyTable) addressExpressions(out []nfnetlink.Expr, at uint32, address, mask []byte, inverted bool) []nfnetlink.Expr {
	length, prefix := maskLength(mask)
	if length == 0 && prefix && !inverted {
		return out
	}
	size := len(address)
	whole := prefix && length > 0 && length%8 == 0 && !slices.ContainsFunc(address[length/8:], notZero)
	if whole {
		size = length / 8
	}
	load := nfnetlink.Payload{Base: unix.NFT_PAYLOAD_NETWORK_HEADER, Offset: at, Len: uint32(size), Dreg: nfnetlink.Reg1}
	if s.load != load {
		s.load = load
	}
	out = append(out, s.load)
	if !whole {
		out = append(out, nfnetlink.Bitwise{Sreg: nfnetlink.Reg1, Dreg: nfnetlink.Reg1, Len: uint32(size), Mask: mask, Xor: make([]byte, size)})
	}
	return append(out, nfnetlink.Cmp{Op: operator(inverted), Sreg: nfnetlink.Reg1, Data: address[:size]})
}

// interfaceExpressions appends `oifname NAME`.
func interfaceExpressions(out []nfnetlink.Expr, key uint32, name, mask []byte, inverted bool) []nfnetlink.Expr {
	length, contiguous := maskLength(mask)
	switch {
	case !contiguous || length%8 != 0:
		return append(out, nfnetlink.Unknown{Kind: "interface under an odd mask"})
	case length == 0 && !inverted:
		return out
	}
	return append(out, nfnetlink.Meta{Key: key, Reg: nfnetlink.Reg1},
		nfnetlink.Cmp{Op: operator(inverted), Sreg: nfnetlink.Reg1, Data: name[:length/8]})
}

// maskLength returns the number of leading ones of a mask, and whether no other
// bit is set.
func maskLength(mask []byte) (int, bool) {
	n := 0
	for n < 8*len(mask) && mask[n/8] == 0xff {
		n += 8
	}
	rest := mask[n/8:]
	if len(rest) == 0 {
		return n, true
	}
	ones := bits.LeadingZeros8(^rest[0])
	return n + ones, rest[0]<<ones == 0 && !slices.ContainsFunc(rest[1:], notZero)
}

func notZero(b byte) bool { return b != 0 }

// verdictExpression appends what a rule without a named target does. A rule that
// continues with the next one has no verdict.
func (s *legacyTable) verdictExpression(out []nfnetlink.Expr, i int, goes bool) []nfnetlink.Expr {
	verdict, ok := s.verdict(i)
	if verdict == verdictReturn {
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Return})
	}
	chain, leads := s.chainAt(verdict)
	switch {
	case !ok:
		return append(out, nfnetlink.Unknown{Kind: "damaged verdict"})
	case verdict == verdictAccept:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Accept})
	case verdict == verdictDrop:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Drop})
	case verdict == s.offsets[i+1]:
		return out
	case leads && goes:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Goto, Chain: chain})
	case leads:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Jump, Chain: chain})
	}
	return append(out, nfnetlink.Unknown{Kind: "another verdict"})
}
