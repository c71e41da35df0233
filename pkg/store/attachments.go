// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Attachment is an interface of a container in a network.
type Attachment struct {
	ContainerID, IfName string
}

func (a Attachment) file() string { return hashName("attachment", a.ContainerID, a.IfName) }

// network opens the directory of a network's attachments in this boot.
func (d *Dir) network(name string, create bool) (*folder, error) {
	boot, err := d.boot()
	if err != nil {
		return nil, err
	}
	return d.descend(create, attachmentsDir, boot, hashName("network", name))
}

// Attach notes that a container has an interface in a network. It takes no lock
// and syncs nothing: an attachment means something in this boot only. Once more
// is fine.
func (d *Dir) Attach(network, containerID, ifname string) error {
	name := Attachment{containerID, ifname}.file()
	const attempts = 100
	var err error
	for range attempts { // a directory can go away before it is used
		if err = d.attach(network, name); !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return err
}

func (d *Dir) attach(network, name string) error {
	const op = "write attachment"
	f, err := d.network(network, true)
	if err != nil {
		return err
	}
	defer f.close()
	fd, err := f.create(op, name)
	if errors.Is(err, os.ErrExist) {
		fd, _, err = f.open(op, name, unix.O_RDONLY)
	}
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// Detach forgets an attachment of this boot. One that is absent is fine, and
// nothing is ever created.
func (d *Dir) Detach(network, containerID, ifname string) error {
	f, err := d.network(network, false)
	if err != nil {
		return ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	return f.remove(Attachment{containerID, ifname}.file())
}

// Attachments counts the network's attachments of this boot, and tells when
// their number last changed: the mtime of their directory, or the zero Time
// where this boot has seen none.
func (d *Dir) Attachments(network string) (n int, changed time.Time, err error) {
	f, err := d.network(network, false)
	if err != nil {
		return 0, time.Time{}, ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	names, err := f.names()
	if err != nil { // it may be removed since it was opened
		return 0, time.Time{}, ignoring(err, os.ErrNotExist)
	}
	changed, err = f.changed()
	return len(names), changed, err
}

// Prune forgets the network's attachments of this boot but for those to keep,
// and creates nothing.
func (d *Dir) Prune(network string, keep []Attachment) error {
	f, err := d.network(network, false)
	if err != nil {
		return ignoring(err, os.ErrNotExist)
	}
	defer f.close()
	names, err := f.names()
	if err != nil { // it may be removed since it was opened
		return ignoring(err, os.ErrNotExist)
	}
	kept := make(map[string]bool, len(keep))
	for _, a := range keep {
		kept[a.file()] = true
	}
	var errs []error
	for _, name := range names {
		if _, err := f.recognize(inNetwork, name); err == nil && !kept[name] {
			errs = append(errs, f.remove(name))
		}
	}
	return errors.Join(errs...)
}
