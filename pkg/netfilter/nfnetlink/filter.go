// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"

	"golang.org/x/sys/unix"
)

// attachFilter attaches filter to a socket. Linux allows 20 KiB for its program by default (128 KiB since 6.8),
// in which a load takes ten instructions of 8 bytes.
func (w *Watched) attachFilter(fd int) error {
	for messages := 64; ; messages /= 2 {
		program := w.filter(messages)
		err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
		if !errors.Is(err, unix.ENOMEM) || messages == 1 {
			return err
		}
	}
}

// filter returns a classic BPF program. It passes a datagram with the end of a commit, or with a message for
// which touches may be true: about a table whose name begins as that of a watched one does. But it skips rules
// and chains of kube-proxy in the shared table, as there are tens of thousands. What does not have the form of
// the kernel's messages, or more messages than given, passes.
func (w *Watched) filter(messages int) []unix.SockFilter {
	// Offsets in a message. Its first attribute is the name of the table. The second one of a rule is the name
	// of its chain. So is that of a chain since Linux 6.2; before, it is the handle, and the message passes.
	const typeAt, tableAt, nameAt = 4, 20, 24
	chainAt := uint32(nameAt + align4(len(w.Shared)+1))
	chainNameAt := chainAt + attrHeader
	proxy := "KUBE-" // not allowed for masquerade chains

	const onward, pass, drop, skip, chain, rule, named = 0, 250, 251, 252, 253, 254, 255 // labels, where jumps lead
	labels := map[uint8]int{}
	var one []unix.SockFilter // examines the message at X
	emit := func(code uint16, k uint32) { one = append(one, unix.SockFilter{Code: code, K: k}) }
	load := func(size uint16, at uint32) { emit(unix.BPF_LD|unix.BPF_IND|size, at) }
	jump := func(test uint16, k uint32, yes, no uint8) {
		one = append(one, unix.SockFilter{Code: unix.BPF_JMP | test, Jt: yes, Jf: no, K: k})
	}
	label := func(l uint8) { labels[l] = len(one) }
	// The program loads numbers in network order; those of netlink are in that of the machine.
	number := func(n uint16) uint32 {
		return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, n)))
	}
	word := func(name string) uint32 { return binary.BigEndian.Uint32(append([]byte(name), 0, 0, 0, 0)) }
	ofType := func(t uint16) uint32 { return number(messageType(t)) }
	const length, header, x = 0, 1, 2 // in the scratch memory

	emit(unix.BPF_LD|unix.BPF_LEN, 0)
	emit(unix.BPF_ST, length) // because the kernel checks that it is stored before it is loaded, even after BPF_RET
	jump(unix.BPF_JGE|unix.BPF_X, 0, onward, pass)
	emit(unix.BPF_ALU|unix.BPF_SUB|unix.BPF_X, 0)
	jump(unix.BPF_JEQ, 0, drop, onward) // there is no further message
	jump(unix.BPF_JGE, chainNameAt+uint32(len(proxy)), onward, pass)
	load(unix.BPF_W, 0) // the length, below 64 KiB
	if number(1) == 1 {
		jump(unix.BPF_JSET, 0xffff<<16, pass, onward)
		emit(unix.BPF_ST, length)
	} else {
		jump(unix.BPF_JSET, 0xffff, pass, onward)
		emit(unix.BPF_ST, length)
		emit(unix.BPF_ALU|unix.BPF_RSH, 24)
		emit(unix.BPF_STX, x)
		emit(unix.BPF_MISC|unix.BPF_TAX, 0)
		emit(unix.BPF_LD|unix.BPF_MEM, length)
		emit(unix.BPF_ALU|unix.BPF_RSH, 8)
		emit(unix.BPF_ALU|unix.BPF_AND, 0xff00)
		emit(unix.BPF_ALU|unix.BPF_OR|unix.BPF_X, 0)
		emit(unix.BPF_LDX|unix.BPF_MEM, x)
		emit(unix.BPF_ST, length)
	}
	jump(unix.BPF_JSET, 3, pass, onward)
	jump(unix.BPF_JGE, chainNameAt+uint32(len(proxy)), onward, pass)
	load(unix.BPF_H, typeAt)
	jump(unix.BPF_JEQ, ofType(unix.NFT_MSG_NEWGEN), pass, onward)
	emit(unix.BPF_ST, header)
	load(unix.BPF_H, tableAt+2)
	jump(unix.BPF_JEQ, number(unix.NFTA_TABLE_NAME), onward, pass)
	load(unix.BPF_W, nameAt)
	for _, table := range w.Tables {
		jump(unix.BPF_JEQ, word(table), pass, onward)
	}
	jump(unix.BPF_JEQ, word(w.Shared), onward, skip)
	load(unix.BPF_H, tableAt)
	jump(unix.BPF_JEQ, number(uint16(attrHeader+len(w.Shared)+1)), onward, pass)
	emit(unix.BPF_LD|unix.BPF_MEM, header)
	jump(unix.BPF_JEQ, ofType(unix.NFT_MSG_NEWRULE), rule, onward)
	jump(unix.BPF_JEQ, ofType(unix.NFT_MSG_DELRULE), rule, onward)
	jump(unix.BPF_JEQ, ofType(unix.NFT_MSG_NEWCHAIN), chain, onward)
	jump(unix.BPF_JEQ, ofType(unix.NFT_MSG_DELCHAIN), chain, pass)
	label(chain)
	load(unix.BPF_H, chainAt+2)
	jump(unix.BPF_JEQ, number(unix.NFTA_CHAIN_NAME), named, pass)
	label(rule)
	load(unix.BPF_H, chainAt+2)
	jump(unix.BPF_JEQ, number(unix.NFTA_RULE_CHAIN), named, pass)
	label(named)
	load(unix.BPF_W, chainNameAt)
	jump(unix.BPF_JEQ, word(proxy), onward, pass)
	load(unix.BPF_B, chainNameAt+4)
	jump(unix.BPF_JEQ, uint32(proxy[4]), skip, pass)
	label(pass)
	emit(unix.BPF_RET, math.MaxUint32) // untrimmed: other listeners may have the same buffer
	label(drop)
	emit(unix.BPF_RET, 0)
	label(skip)
	emit(unix.BPF_LD|unix.BPF_MEM, length)
	emit(unix.BPF_ALU|unix.BPF_ADD|unix.BPF_X, 0)
	emit(unix.BPF_MISC|unix.BPF_TAX, 0)

	for i := range one {
		for _, to := range []*uint8{&one[i].Jt, &one[i].Jf} {
			if at, is := labels[*to]; is && *to >= pass {
				*to = uint8(at - i - 1)
			}
		}
	}
	program := append([]unix.SockFilter{{Code: unix.BPF_LDX | unix.BPF_IMM}}, slices.Repeat(one, messages)...)
	return append(program, unix.SockFilter{Code: unix.BPF_RET, K: math.MaxUint32})
}
