// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
)

// hangMark tells the other processes of ip-masq that a program hangs for this one, so that they do
// not wait for the same program as long. Each ADD is a process of its own, and 20 of them may start
// in the same second.
//
// The mark is a POSIX lock for reading, on one byte of the program's file. It ends with its
// process, leaves no file behind, and costs nothing while programs end in time. Any user can take
// such a lock, so one counts only if it is that of a process of root, which nobody else can make
// answer ADDs with "try again later". A file of ip-masq's own would need a directory that exists
// before the dataDir is known; a process that is looked for in /proc costs milliseconds on a node
// with a thousand processes.
type hangMark struct {
	path   string
	offset int64

	mu   sync.Mutex // of what follows
	file *os.File   // stays open: to close any file of the same inode would remove the mark
	late int        // calls that take too long
}

func newHangMark(path string) *hangMark {
	const highest = 1 << 62
	// One file can be all programs, by its name.
	h := fnv.New64a()
	_, _ = io.WriteString(h, path)
	return &hangMark{path: path, offset: int64(h.Sum64() % highest)}
}

// isSet reports whether another process has the mark, of a user who is trusted.
func (m *hangMark) isSet(trusted func(uid uint32) bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	pid := m.holder()
	if pid <= 0 {
		return false
	}
	var st unix.Stat_t
	err := unix.Stat("/proc/"+strconv.Itoa(pid), &st)
	return err == nil && trusted(st.Uid)
}

// watch sets the mark if a call takes longer than a time. The function that it returns ends the call.
func (m *hangMark) watch(d time.Duration) (end func()) {
	const (
		running = iota
		isLate
		ended
	)
	state := running
	timer := time.AfterFunc(d, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if state == running {
			state = isLate
			m.late++
			m.setLock(unix.F_RDLCK)
		}
	})
	return func() {
		timer.Stop()
		m.mu.Lock()
		defer m.mu.Unlock()
		if state == isLate {
			m.late--
			if m.late == 0 {
				m.setLock(unix.F_UNLCK)
			}
		}
		state = ended
	}
}

// setLock sets or removes the lock of this process. Without a lock, other processes wait longer.
func (m *hangMark) setLock(typ int16) {
	l := m.flock(typ)
	_ = m.control(unix.F_SETLK, &l)
}

// holder returns the process that has the lock, 0 if no other one has it or that is not known.
func (m *hangMark) holder() (pid int) {
	l := m.flock(unix.F_WRLCK)
	err := m.control(unix.F_GETLK, &l)
	if err != nil || l.Type == unix.F_UNLCK {
		return 0
	}
	return int(l.Pid)
}

func (m *hangMark) flock(typ int16) unix.Flock_t {
	return unix.Flock_t{Type: typ, Whence: io.SeekStart, Start: m.offset, Len: 1}
}

// control calls fcntl(2) with the file of the program. If that cannot be opened, running the program will say why.
func (m *hangMark) control(command int, l *unix.Flock_t) error {
	if m.file == nil {
		file, err := os.Open(m.path)
		if err != nil {
			return err
		}
		m.file = file
	}
	return unix.FcntlFlock(m.file.Fd(), command, l)
}

// hangsElsewhere is the error of a program for which another call waits too long.
func hangsElsewhere(path string) error {
	return fmt.Errorf("run %s: %w for another process of ip-masq, which ends it after %s: %w",
		path, errHangs, limit, netfilter.ErrBusy)
}
