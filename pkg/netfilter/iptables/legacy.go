// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nfnetlink"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// LegacyChain is a chain of iptables-legacy.
type LegacyChain struct {
	Rules []nfnetlink.Rule // with the expressions of iptables-nft, or Unknown
	Drops bool             // by its policy
}

// Legacy returns all chains of a table of iptables-legacy by name, none if the table is not in use. It
// creates no table.
func Legacy(f policy.Family, tableName string) (map[string]LegacyChain, error) {
	s, err := readLegacy(f, tableName)
	if err != nil {
		return nil, err
	}
	chains := map[string]LegacyChain{}
	for name := range s.chains {
		rules, _ := s.rules(name)
		chains[name] = LegacyChain{Rules: rules, Drops: s.drops(name)}
	}
	return chains, nil
}

// drops reports whether the policy of a chain is to drop. Only that of a built-in chain can be.
func (s *legacyTable) drops(chain string) bool {
	c, exists := s.chains[chain]
	if !exists {
		return false
	}
	_, last := s.entry(c.end)
	return verdictOf(last) == verdictDrop
}

type legacyReader struct{}

func (legacyReader) read(f policy.Family, names []string) (t table, err error) {
	s, err := readLegacy(f, Table)
	if err != nil {
		return t, err
	}
	if s.drops(postrouting) {
		t.fault = policyFault(f)
	}
	err = t.read(f, names, s.rules)
	return t, err
}

func (legacyReader) chainNames(f policy.Family, tableName, only string) ([]string, error) {
	s, err := readLegacy(f, tableName)
	if err != nil {
		return nil, err
	}
	if only == "" {
		return slices.Sorted(maps.Keys(s.chains)), nil
	}
	if _, exists := s.chains[only]; !exists {
		return nil, nil
	}
	return []string{only}, nil
}

// rules returns the rules of a chain, or fs.ErrNotExist.
func (s *legacyTable) rules(chain string) ([]nfnetlink.Rule, error) {
	c, exists := s.chains[chain]
	if !exists {
		return nil, fs.ErrNotExist
	}
	rules := make([]nfnetlink.Rule, c.end-c.first)
	for i := range rules {
		rules[i] = nfnetlink.Rule{Chain: chain, Exprs: s.expressions(c.first + i)}
	}
	return rules, nil
}

// legacyInUse reports whether a table of iptables-legacy exists in this network namespace. The
// socket options would create it. (/proc/net shows the namespace of the process's first thread.)
func legacyInUse(f policy.Family, tableName string) (bool, error) {
	path := "/proc/thread-self/net/ip_tables_names"
	if f == policy.IPv6 {
		path = "/proc/thread-self/net/ip6_tables_names"
	}
	names, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) { // the kernel's module is not loaded
		return false, nil
	}
	if errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w; run as root", err)
	}
	if err != nil {
		return false, fmt.Errorf("find the tables of iptables-legacy: %w", err)
	}
	return slices.Contains(strings.Fields(string(names)), tableName), nil
}

// legacyTable is a table of iptables-legacy as IPT_SO_GET_INFO and IPT_SO_GET_ENTRIES return it
// (linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h). The zero value has no
// chains.
type legacyTable struct {
	family  policy.Family
	layout  entryLayout
	entries []byte   // of struct ipt_get_entries
	offsets []uint32 // of each entry, and the end of the last one
	chains  map[string]legacyChain
}

// The layouts below are those of 64-bit machines. This line does not compile for 32 bits.
const _ uint = 1 << 63

// Sizes and offsets in struct ipt_getinfo and struct ipt_get_entries of both families.
const (
	nameSize        = 32 // XT_TABLE_MAXNAMELEN
	infoSize        = 84
	infoHooks       = 36 // hook_entry[NF_INET_NUMHOOKS], then underflow[NF_INET_NUMHOOKS]
	infoEntriesSize = 80 // size
	entriesHead     = 40 // sizeof(struct ipt_get_entries)
)

// entryLayout has the offsets in struct ipt_entry and struct ip6t_entry, which begin with
// addresses: source, destination and their masks.
type entryLayout struct {
	address    int // size of an address
	interfaces int // names in and out, then masks in and out, IFNAMSIZ each
	protocol   int // uint16
	flags      int // uint8, then the inversions
	gotoFlag   byte
	plainFlags byte // flags that do not narrow what the rule matches
	protoFlag  byte // IP6T_F_PROTO, without which the protocol is not compared; 0: no such flag
	targetAt   int  // uint16: offset of the target in the entry; then the size of the entry
	packetsAt  int  // uint64
	size       int
}

func entryLayoutOf(f policy.Family) entryLayout {
	if f == policy.IPv6 {
		return entryLayout{address: 16, interfaces: 64, protocol: 128, flags: 131, gotoFlag: 0x04,
			plainFlags: 0x01 | 0x04, protoFlag: 0x01, targetAt: 140, packetsAt: 152, size: 168}
	}
	return entryLayout{address: 4, interfaces: 16, protocol: 80, flags: 82, gotoFlag: 0x02,
		plainFlags: 0x02, targetAt: 88, packetsAt: 96, size: 112}
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
		info := newBuffer(infoSize, tableName)
		err := getsockopt(fd, level, getInfo, info)
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("%w; it needs CAP_NET_ADMIN over the network namespace", err)
		}
		if err != nil {
			return nil, fmt.Errorf("read table %s of iptables-legacy: IPT_SO_GET_INFO: %w", tableName, err)
		}
		size := binary.NativeEndian.Uint32(info[infoEntriesSize:])
		reply := newBuffer(entriesHead+int(size), tableName)
		binary.NativeEndian.PutUint32(reply[nameSize:], size)
		err = getsockopt(fd, level, getEntries, reply)
		if errors.Is(err, unix.EAGAIN) { // the table has another size by now
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read table %s of iptables-legacy: IPT_SO_GET_ENTRIES: %w", tableName, err)
		}
		again := newBuffer(infoSize, tableName)
		if err := getsockopt(fd, level, getInfo, again); err == nil && bytes.Equal(again, info) {
			return parseLegacy(f, info, reply[entriesHead:])
		}
	}
	return nil, fmt.Errorf("read table %s of iptables-legacy: it changed %d times meanwhile: %w",
		tableName, tries, unix.EAGAIN)
}

// newBuffer returns a buffer of the size that begins with the table's name.
func newBuffer(size int, tableName string) []byte {
	b := make([]byte, size)
	copy(b[:nameSize-1], tableName)
	return b
}

func getsockopt(fd, level, option int, b []byte) error {
	size := uint32(len(b))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option),
		uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// legacyChain has the numbers of a chain's entries, without the one that iptables adds at its end.
type legacyChain struct{ first, end int }

// builtInChains are the names of the built-in chains by the number of their hook.
func builtInChains() []string {
	return []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", postrouting}
}

var errLegacyLayout = errors.New("the kernel's reply does not have the layout of a table of iptables-legacy")

// parseLegacy finds the entries and the chains, and decodes no rules: there can be tens of
// thousands.
//
// A user-defined chain begins after an entry with the target ERROR, which has its name, and ends
// with a rule that iptables adds. One more such entry ends the table. A built-in chain begins at
// the offset hook_entry of its hook and ends with its policy, at the offset underflow.
func parseLegacy(f policy.Family, info, entries []byte) (*legacyTable, error) {
	s := &legacyTable{family: f, layout: entryLayoutOf(f), entries: entries, chains: map[string]legacyChain{}}
	s.offsets = make([]uint32, 1, 1+len(entries)/s.layout.size)
	if len(info) != infoSize {
		return nil, errLegacyLayout
	}
	name, first := "", 0 // of the user-defined chain
	for rest := entries; len(rest) > 0; {
		target, next, ok := s.layout.cutEntry(rest)
		if !ok {
			return nil, errLegacyLayout
		}
		if head, begins := target.chainName(); begins {
			n := len(s.offsets) - 1
			if first > 0 {
				s.chains[name] = legacyChain{first, max(first, n-1)}
			}
			name, first = string(head), n+1
		}
		rest = rest[next:]
		s.offsets = append(s.offsets, uint32(len(entries)-len(rest)))
	}
	s.findBuiltIn(info)
	return s, nil
}

// cutEntry returns the target of the entry at the beginning of b, and the size of the entry.
func (l *entryLayout) cutEntry(b []byte) (target extension, size int, ok bool) {
	if len(b) < l.size {
		return target, 0, false
	}
	targetAt := int(binary.NativeEndian.Uint16(b[l.targetAt:]))
	size = int(binary.NativeEndian.Uint16(b[l.targetAt+2:]))
	if targetAt < l.size || size < targetAt || size > len(b) {
		return target, 0, false
	}
	target, _, ok = cutExtension(b[targetAt:size])
	return target, size, ok
}

// findBuiltIn finds the built-in chains by their offsets in a struct ipt_getinfo.
func (s *legacyTable) findBuiltIn(info []byte) {
	hooks := builtInChains()
	for hook, name := range hooks {
		first, begins := s.entryAt(info, hook)
		end, ends := s.entryAt(info, len(hooks)+hook)
		if begins && ends && first <= end && end < len(s.offsets)-1 {
			s.chains[name] = legacyChain{first, end}
		}
	}
}

// entryAt returns the number of the entry whose offset is in a field of hook_entry and underflow.
func (s *legacyTable) entryAt(info []byte, field int) (int, bool) {
	const size = 4 // of a field
	offset := binary.NativeEndian.Uint32(info[infoHooks+size*field:])
	return slices.BinarySearch(s.offsets, offset)
}

// extension is a struct xt_entry_match or xt_entry_target.
type extension struct {
	name     []byte
	revision uint32
	info     []byte
}

// Sizes and offsets in both structs.
const (
	extensionHead = 32
	nameAt        = 2
	revisionAt    = 31
)

// cutExtension returns the extension at the beginning of b and what follows it.
func cutExtension(b []byte) (x extension, rest []byte, ok bool) {
	if len(b) < extensionHead {
		return x, nil, false
	}
	size := int(binary.NativeEndian.Uint16(b))
	if size < extensionHead || size > len(b) {
		return x, nil, false
	}
	name, _, _ := bytes.Cut(b[nameAt:revisionAt], []byte{0})
	return extension{name, uint32(b[revisionAt]), b[extensionHead:size]}, b[size:], true
}

// chainName returns the name of the chain that begins after an entry with the target.
func (x extension) chainName() ([]byte, bool) {
	name, _, _ := bytes.Cut(x.info, []byte{0})
	return name, string(x.name) == "ERROR"
}

// Verdicts in a struct xt_standard_target, the target without a name.
const (
	verdictDrop   = -1 // -NF_DROP - 1
	verdictAccept = -2 // -NF_ACCEPT - 1
	verdictReturn = -5 // XT_RETURN, -NF_REPEAT - 1
)

// verdictOf returns the verdict of a standard target, or the offset of the rule to continue with.
func verdictOf(target extension) int {
	if len(target.info) < 4 {
		return 0 // no chain begins there
	}
	return int(int32(binary.NativeEndian.Uint32(target.info)))
}

// entry returns the ith entry and its target.
func (s *legacyTable) entry(i int) (entry []byte, target extension) {
	entry = s.entries[s.offsets[i]:s.offsets[i+1]]
	targetAt := binary.NativeEndian.Uint16(entry[s.layout.targetAt:])
	target, _, _ = cutExtension(entry[targetAt:]) // parseLegacy has verified it
	return entry, target
}

// chainAt returns the chain whose first rule is at the offset: jumps lead there.
func (s *legacyTable) chainAt(offset int) (string, bool) {
	i, found := slices.BinarySearch(s.offsets, uint32(max(offset, 0)))
	if !found || i == 0 || i == len(s.offsets)-1 {
		return "", false
	}
	_, before := s.entry(i - 1)
	name, begins := before.chainName()
	return string(name), begins
}

// Bits of the inversions (IPT_INV_*, IP6T_INV_*).
const (
	invertIn          byte = 0x01
	invertOut         byte = 0x02
	invertSource      byte = 0x08
	invertDestination byte = 0x10
	invertProtocol    byte = 0x40
)

// expressions returns an entry's rule as iptables-nft writes it, but with loads of whole addresses:
// one decoder serves both variants.
func (s *legacyTable) expressions(i int) []nfnetlink.Expr {
	out := make([]nfnetlink.Expr, 0, 8) // a rule has seldom more
	l := s.layout
	entry, target := s.entry(i)
	flags, invert := entry[l.flags], entry[l.flags+1]
	link := netfilter.LinkOf(s.family)

	load := nfnetlink.LoadAddress(link, nfnetlink.Source, nfnetlink.Reg1)
	source, mask := l.addressIn(entry, 0), l.addressIn(entry, 2)
	out = addressExpressions(out, load, source, mask, invert&invertSource != 0)
	load = nfnetlink.LoadAddress(link, nfnetlink.Destination, nfnetlink.Reg1)
	destination, mask := l.addressIn(entry, 1), l.addressIn(entry, 3)
	out = addressExpressions(out, load, destination, mask, invert&invertDestination != 0)
	in, inMask := l.nameIn(entry, 0), l.nameIn(entry, 2)
	out = interfaceExpressions(out, unix.NFT_META_IIFNAME, in, inMask, invert&invertIn != 0)
	output, outputMask := l.nameIn(entry, 1), l.nameIn(entry, 3)
	out = interfaceExpressions(out, unix.NFT_META_OIFNAME, output, outputMask, invert&invertOut != 0)
	number := binary.NativeEndian.Uint16(entry[l.protocol:])
	out = l.protocolExpressions(out, number, flags, invert&invertProtocol != 0)
	const known = invertIn | invertOut | invertSource | invertDestination | invertProtocol
	if flags&^l.plainFlags != 0 || invert&^known != 0 {
		out = append(out, nfnetlink.Unknown{Kind: "fragment or type of service"})
	}
	for rest := entry[l.size:binary.NativeEndian.Uint16(entry[l.targetAt:])]; len(rest) > 0; {
		var match extension
		var ok bool
		match, rest, ok = cutExtension(rest)
		if !ok {
			return append(out, nfnetlink.Unknown{Kind: "damaged match"})
		}
		out = append(out, nfnetlink.Match{Xt: string(match.name), Rev: match.revision, Info: match.info})
	}
	if packets := binary.NativeEndian.Uint64(entry[l.packetsAt:]); packets > 0 {
		out = append(out, nfnetlink.Counter{Packets: packets})
	}
	if len(target.name) > 0 {
		return append(out, nfnetlink.Target{Xt: string(target.name), Rev: target.revision, Info: target.info})
	}
	return s.verdictExpression(out, i, verdictOf(target), flags&l.gotoFlag != 0)
}

// verdictExpression appends the verdict of a standard target. One that leads to the next rule is no verdict: the rule
// only counts.
func (s *legacyTable) verdictExpression(out []nfnetlink.Expr, i, verdict int, isGoto bool) []nfnetlink.Expr {
	switch verdict {
	case verdictReturn:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Return})
	case verdictAccept:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Accept})
	case verdictDrop:
		return append(out, nfnetlink.Verdict{Code: nfnetlink.Drop})
	case int(s.offsets[i+1]):
		return out
	}
	chain, leads := s.chainAt(verdict)
	if !leads {
		return append(out, nfnetlink.Unknown{Kind: "another verdict"})
	}
	code := nfnetlink.Jump
	if isGoto {
		code = nfnetlink.Goto
	}
	return append(out, nfnetlink.Verdict{Code: code, Chain: chain})
}

// addressIn returns the ith address of an entry: source, destination, and their masks.
func (l *entryLayout) addressIn(entry []byte, i int) []byte {
	return entry[i*l.address : (i+1)*l.address]
}

// nameIn returns the ith name of an interface in an entry: in, out, and their masks.
func (l *entryLayout) nameIn(entry []byte, i int) []byte {
	from := l.interfaces + i*unix.IFNAMSIZ
	return entry[from : from+unix.IFNAMSIZ]
}

// protocolExpressions appends `meta l4proto NUMBER`.
func (l *entryLayout) protocolExpressions(
	out []nfnetlink.Expr, number uint16, flags byte, inverted bool,
) []nfnetlink.Expr {
	isCompared := l.protoFlag == 0 || flags&l.protoFlag != 0
	if number != 0 && isCompared {
		return append(out, nfnetlink.Meta{Key: unix.NFT_META_L4PROTO, Dreg: nfnetlink.Reg1},
			nfnetlink.Cmp{Op: operator(inverted), Sreg: nfnetlink.Reg1, Data: []byte{byte(number)}})
	}
	if flags&l.protoFlag != 0 {
		return append(out, nfnetlink.Unknown{Kind: "protocol 0"})
	}
	return out
}

func operator(inverted bool) nfnetlink.CmpOp {
	if inverted {
		return nfnetlink.NotEqual
	}
	return nfnetlink.Equal
}

// addressExpressions appends `ip saddr ADDRESS/MASK`, or of the address that is loaded.
func addressExpressions(
	out []nfnetlink.Expr, load nfnetlink.Payload, address, mask []byte, inverted bool,
) []nfnetlink.Expr {
	if !inverted && filledWith(0, mask) {
		return out
	}
	out = append(out, load)
	if !filledWith(0xff, mask) {
		masked := nfnetlink.Bitwise{Sreg: nfnetlink.Reg1, Dreg: nfnetlink.Reg1, Len: load.Len, Mask: mask}
		out = append(out, masked)
	}
	return append(out, nfnetlink.Cmp{Op: operator(inverted), Sreg: nfnetlink.Reg1, Data: address})
}

// interfaceExpressions appends `oifname NAME`.
func interfaceExpressions(
	out []nfnetlink.Expr, key uint32, name, mask []byte, inverted bool,
) []nfnetlink.Expr {
	length := 0
	for length < len(mask) && mask[length] == 0xff {
		length++
	}
	if !filledWith(0, mask[length:]) {
		return append(out, nfnetlink.Unknown{Kind: "interface under an odd mask"})
	}
	if length == 0 && !inverted {
		return out
	}
	return append(out, nfnetlink.Meta{Key: key, Dreg: nfnetlink.Reg1},
		nfnetlink.Cmp{Op: operator(inverted), Sreg: nfnetlink.Reg1, Data: name[:length]})
}

func filledWith(value byte, b []byte) bool {
	for _, c := range b {
		if c != value {
			return false
		}
	}
	return true
}
